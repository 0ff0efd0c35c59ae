"""Tabular regression with own worker processes."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def houses(n=400):
    g = torch.Generator().manual_seed(29)
    area = 40 + 160 * torch.rand(n, 1, generator=g)
    rooms = (area / 30).round() + torch.randint(0, 2, (n, 1), generator=g)
    age = 80 * torch.rand(n, 1, generator=g)
    price = 3 * area + 20 * rooms - 1.5 * age + 15 * torch.randn(n, 1, generator=g)
    x = torch.cat([area / 100, rooms / 5, age / 40], 1)
    return TensorDataset(x, price / 300)


def setup(rank, world_size, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)


def train(rank, world_size, args):
    torch.set_num_threads(1)
    setup(rank, world_size, args.port)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = houses()
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, price in loader:
            loss = nn.functional.huber_loss(model(x), price)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader) / world_size:.4f}", flush=True)
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--procs", type=int, default=2)
    ap.add_argument("--port", type=int, default=29877)
    args = ap.parse_args()
    mp.spawn(train, nprocs=args.procs, args=(args.procs, args), join=True)


if __name__ == "__main__":
    main()
