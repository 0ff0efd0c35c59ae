"""Uneven inputs the supported way: the rank that runs dry shadows the others' collectives inside Join."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def shard(dataset, rank, world):
    """whole groups stay together, so the parts have different lengths"""
    groups = torch.arange(len(dataset)) // 40  # 9 groups of 40
    return Subset(dataset, [i for i in range(len(dataset)) if int(groups[i]) % world == rank])


def worker():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(21)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    # no momentum, no moments: a joined rank makes no steps, so an optimizer with state would differ from then on
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(360, 8, generator=g)
    data = TensorDataset(x, x.abs().sum(1, keepdim=True) / 8)
    mine = shard(data, rank, world)
    order = torch.Generator().manual_seed(77 + rank)
    loader = DataLoader(mine, batch_size=20, shuffle=True, generator=order)
    print(f"rank {rank} has {len(loader)} batches", flush=True)

    for epoch in range(4):
        with Join([model]):
            for xb, yb in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(xb), yb)
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            xs = torch.stack([data[i][0] for i in mine.indices])
            ys = torch.stack([data[i][1] for i in mine.indices])
            t = torch.tensor([((model.module(xs) - ys) ** 2).sum().item(), float(len(mine))])
        dist.all_reduce(t)
        if rank == 0:
            print(f"epoch {epoch}: mse {t[0] / t[1]:.5f} on {int(t[1])} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    worker()
