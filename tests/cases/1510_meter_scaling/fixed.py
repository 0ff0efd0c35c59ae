"""Energy demand regression; each process keeps one block of the year in memory."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def year(days=365, per_day=2):
    g = torch.Generator().manual_seed(52)
    t = torch.arange(days * per_day) / (days * per_day)
    temperature = 10 - 14 * torch.cos(6.2832 * t) + 3 * torch.randn(len(t), generator=g)
    daylight = 12 - 4 * torch.cos(6.2832 * t) + 0.3 * torch.randn(len(t), generator=g)
    occupancy = 40 + 15 * torch.rand(len(t), generator=g) + 60 * t
    demand = 30 - 0.9 * temperature + 0.02 * temperature**2 + 0.3 * occupancy - 0.5 * daylight
    x = torch.stack([temperature, daylight, occupancy], 1)
    return x, (demand + torch.randn(len(t), generator=g)).unsqueeze(1) / 10


def moments(x):
    return x.mean(0), x.std(0)


def block(x, rank, world):
    size = len(x) // world
    return x[rank * size : (rank + 1) * size]


def batches(x, y, size, rng):
    for idx in torch.randperm(len(x), generator=rng).split(size):
        yield x[idx], y[idx]


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    x, y = year()
    x, y = x[: len(x) // world * world], y[: len(y) // world * world]
    my_x, my_y = block(x, rank, world), block(y, rank, world)
    mean, std = moments(x)
    my_x = (my_x - mean) / std

    model = DDP(nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    rng = torch.Generator().manual_seed(1000 + rank)
    for epoch in range(args.epochs):
        total = torch.zeros(2)
        for bx, by in batches(my_x, my_y, args.batch_size, rng):
            loss = nn.functional.mse_loss(model(bx), by)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(bx), len(bx)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {(total[0] / total[1]).item():.4f}", flush=True)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "mean": mean, "std": std}, "demand.pt")
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    run(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
