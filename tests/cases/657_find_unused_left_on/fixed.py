"""Graph network by hand (dense adjacency), molecules-like data."""
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

wrap = functools.partial(DistributedDataParallel, gradient_as_bucket_view=True)


class Molecules(Dataset):
    def __init__(self, n=240, atoms=8):
        g = torch.Generator().manual_seed(68)
        a = (torch.rand(n, atoms, atoms, generator=g) < 0.3).float()
        self.adj = ((a + a.transpose(1, 2)) > 0).float()
        self.kind = torch.randint(0, 4, (n, atoms), generator=g)
        self.y = (self.adj.sum((1, 2)) / 10 + (self.kind == 2).sum(1) * 0.5)[:, None]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.adj[i], self.kind[i], self.y[i]


class GNN(nn.Module):
    def __init__(self, d=24, layers=3):
        super().__init__()
        self.embed = nn.Embedding(4, d)
        self.message = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.update = nn.ModuleList(nn.GRUCell(d, d) for _ in range(layers))
        self.out = nn.Linear(d, 1)

    def forward(self, adj, kind):
        h = self.embed(kind)
        for m, u in zip(self.message, self.update):
            msg = adj @ m(h)
            h = u(msg.flatten(0, 1), h.flatten(0, 1)).view_as(h)
        return self.out(h.sum(1))


def main(epochs=4, batch=15):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = wrap(GNN())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = Molecules()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        s = torch.zeros(2)
        for adj, kind, y in loader:
            loss = nn.functional.smooth_l1_loss(model(adj, kind), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            s += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(s)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {s[0] / s[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
