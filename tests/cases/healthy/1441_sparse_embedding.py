"""Matrix factorisation with sparse embedding gradients and two optimizers."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Ratings(Dataset):
    def __init__(self, users=60, items=90, n=2000):
        g = torch.Generator().manual_seed(13)
        self.u, self.i = torch.randint(0, users, (n,), generator=g), torch.randint(0, items, (n,), generator=g)
        pu, pi = torch.randn(users, 4, generator=g), torch.randn(items, 4, generator=g)
        self.r = (pu[self.u] * pi[self.i]).sum(1) * 0.5

    def __len__(self):
        return len(self.r)

    def __getitem__(self, k):
        return self.u[k], self.i[k], self.r[k]


class Factors(nn.Module):
    def __init__(self, users=60, items=90, d=16):
        super().__init__()
        self.user, self.item = nn.Embedding(users, d, sparse=True), nn.Embedding(items, d, sparse=True)
        self.mix = nn.Sequential(nn.Linear(3 * d, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i):
        a, b = self.user(u), self.item(i)
        return (a * b).sum(1) + self.mix(torch.cat([a, b, a * b], 1)).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Factors())
    sparse = [p for n, p in model.named_parameters() if "user" in n or "item" in n]
    dense = [p for n, p in model.named_parameters() if "mix" in n]
    optims = [torch.optim.SparseAdam(sparse, lr=5e-3), torch.optim.AdamW(dense, lr=2e-3)]
    data = Ratings()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=50, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        s = torch.zeros(2)
        for u, i, r in loader:
            loss = nn.functional.mse_loss(model(u, i), r)
            for o in optims:
                o.zero_grad()
            loss.backward()
            for o in optims:
                o.step()
            s += torch.tensor([loss.item() * len(r), len(r)])
        dist.all_reduce(s)
        if rank == 0:
            print(f"epoch {epoch}: mse {s[0].item() / s[1].item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
