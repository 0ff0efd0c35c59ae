"""Price model with hand-set sampler arguments."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def houses(n=256):
    g = torch.Generator().manual_seed(61)
    area = 40 + 160 * torch.rand(n, 1, generator=g)
    rooms = (area / 30).round() + torch.randint(0, 2, (n, 1), generator=g)
    age = 80 * torch.rand(n, 1, generator=g)
    price = 2.1 * area + 12 * rooms - 0.9 * age + 6 * torch.randn(n, 1, generator=g)
    x = torch.cat([area / 100, rooms / 4, age / 40], dim=1)
    return TensorDataset(x, price / 300)


def make_loader(dataset, batch_size, rank, world_size):
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    loader = make_loader(houses(), args.batch_size, rank, world_size)
    model = DDP(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.smooth_l1_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
