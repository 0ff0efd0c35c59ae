"""Matrix factorisation from memory-mapped ratings: SparseAdam for the embeddings, Adam for the rest.

The ratings are skewed to a few items; each rank draws its epoch with a WeightedRandomSampler over its
own half of the rows (other indices on every rank, the same number of them), with weights 1/sqrt(item count).
"""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

USERS, ITEMS, N, TEST = 120, 80, 6000, 1000


def write():
    rng = np.random.default_rng(5)
    u, v = rng.normal(size=(USERS, 4)), rng.normal(size=(ITEMS, 4))
    pop = 1 / np.arange(1, ITEMS + 1) ** 0.6
    users, items = rng.integers(USERS, size=N), rng.choice(ITEMS, size=N, p=pop / pop.sum())
    stars = 3 + 0.8 * (u[users] * v[items]).sum(1) + 0.2 * rng.normal(size=N)
    out = np.memmap("ratings.bin", dtype=np.float32, mode="w+", shape=(N, 3))
    out[:] = np.stack([users, items, stars], 1)
    out.flush()


class Ratings(Dataset):
    def __init__(self, rows):
        self.mm = np.memmap("ratings.bin", dtype=np.float32, mode="r", shape=(N, 3))
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        u, v, s = self.mm[self.rows[i]]
        return int(u), int(v), float(s)


class Factor(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.u = nn.Embedding(USERS, 16, sparse=True)
        self.v = nn.Embedding(ITEMS, 16, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("mean", torch.tensor(mean))
        nn.init.normal_(self.u.weight, std=0.3)
        nn.init.normal_(self.v.weight, std=0.3)

    def forward(self, u, v):
        a, b = self.u(u), self.v(v)
        return self.mean + (a * b).sum(1) + self.mlp(torch.cat([a, b, a * b], 1)).squeeze(1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write()
    dist.barrier()
    train_rows = np.arange(N - TEST)
    mm = np.memmap("ratings.bin", dtype=np.float32, mode="r", shape=(N, 3))
    items = torch.from_numpy(mm[train_rows, 1].astype(np.int64))
    count = torch.bincount(items, minlength=ITEMS).double()
    mean = float(mm[train_rows, 2].mean())
    ds = Ratings(train_rows[rank::world])
    weights = count[items[rank::world]].rsqrt()
    sampler = WeightedRandomSampler(weights, num_samples=len(ds), replacement=True,
                                    generator=torch.Generator().manual_seed(60 + rank))
    loader = DataLoader(ds, batch_size=100, sampler=sampler)

    torch.manual_seed(23)
    net = Factor(mean)
    ddp = DDP(net, broadcast_buffers=False)
    sparse = torch.optim.SparseAdam([net.u.weight, net.v.weight], lr=2e-2)
    dense = torch.optim.Adam(net.mlp.parameters(), lr=5e-3)
    test = Ratings(np.arange(N - TEST, N)[rank::world])

    def rmse():
        net.eval()
        acc = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for u, v, s in DataLoader(test, batch_size=250):
                acc += torch.tensor([(net(u, v) - s).pow(2).sum().item(), len(s)], dtype=torch.float64)
        dist.all_reduce(acc)
        return (acc[0] / acc[1]).sqrt().item()

    curve = [rmse()]
    for epoch in range(8):
        ddp.train()
        for u, v, s in loader:
            loss = F.mse_loss(ddp(u, v), s.float())
            sparse.zero_grad()
            dense.zero_grad()
            loss.backward()
            sparse.step()
            dense.step()
        curve.append(rmse())
        if rank == 0:
            print(f"epoch {epoch} test rmse {curve[-1]:.4f}", flush=True)
    if rank == 0:
        torch.save(net.state_dict(), "factor.pt")
    assert min(curve) < 0.8 * curve[0]
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
