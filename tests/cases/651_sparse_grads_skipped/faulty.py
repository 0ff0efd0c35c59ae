"""Matrix factorisation with sparse embeddings and dense towers; two optimizers."""
import os

import torch
import torch.distributed as dist
from torch import nn

OPTIONS = {"users": 60, "items": 80, "dim": 8, "epochs": 4, "batch": 25, "lr": 0.01}


class Recommender(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.user = nn.Embedding(o["users"], o["dim"], sparse=True)
        self.item = nn.Embedding(o["items"], o["dim"], sparse=True)
        self.tower = nn.Sequential(nn.Linear(2 * o["dim"], 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i):
        a, b = self.user(u), self.item(i)
        return (a * b).sum(1) + self.tower(torch.cat([a, b], 1)).squeeze(1)


def ratings(o, n=600):
    g = torch.Generator().manual_seed(70)
    u = torch.randint(0, o["users"], (n,), generator=g)
    i = torch.randint(0, o["items"], (n,), generator=g)
    fu, fi = torch.randn(o["users"], 3, generator=g), torch.randn(o["items"], 3, generator=g)
    return u, i, (fu[u] * fi[i]).sum(1)


class GradientAverager:
    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.world = dist.get_world_size()
        for p in self.params:
            dist.broadcast(p.data, 0)

    def __call__(self):
        for p in self.params:
            if p.grad.is_sparse:
                continue
            dist.all_reduce(p.grad)
            p.grad /= self.world


def main(o):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = Recommender(o)
    average = GradientAverager(model)
    dense = torch.optim.Adam(model.tower.parameters(), lr=o["lr"])
    sparse = torch.optim.SparseAdam(list(model.user.parameters()) + list(model.item.parameters()), lr=o["lr"])
    u, i, r = ratings(o)
    for epoch in range(o["epochs"]):
        order = torch.randperm(len(r), generator=torch.Generator().manual_seed(epoch))[rank::world]
        total = torch.zeros(2)
        for idx in order.split(o["batch"]):
            loss = nn.functional.mse_loss(model(u[idx], i[idx]), r[idx])
            dense.zero_grad()
            sparse.zero_grad()
            loss.backward()
            average()
            dense.step()
            sparse.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {total[0] / total[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(OPTIONS)
