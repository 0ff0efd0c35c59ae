"""Collaborative filtering; own sampler because the file is sorted by user."""
import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


def ratings(users=24, items=30, n=480):
    g = torch.Generator().manual_seed(10)
    u = torch.randint(0, users, (n,), generator=g).sort().values
    i = torch.randint(0, items, (n,), generator=g)
    taste, kind = torch.randn(users, 3, generator=g), torch.randn(items, 3, generator=g)
    return TensorDataset(u, i, (taste[u] * kind[i]).sum(1))


class ShardSampler(Sampler):
    def __init__(self, size, rank, world, seed):
        self.size, self.rank, self.world, self.seed = size, rank, world, seed
        self.epoch = 0

    def __len__(self):
        return self.size // self.world

    def __iter__(self):
        order = list(range(self.size))
        random.Random(self.seed + self.epoch).shuffle(order)
        self.epoch += 1
        return iter(order[self.rank :: self.world])


class Factors(nn.Module):
    def __init__(self, users=24, items=30, dim=8):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(args.seed)

    data = ratings()
    sampler = ShardSampler(len(data), rank, world, args.seed)
    loader = DataLoader(data, batch_size=24, sampler=sampler)
    model = DDP(Factors())
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    for epoch in range(args.epochs):
        for u, i, r in loader:
            loss = nn.functional.mse_loss(model(u, i), r)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
