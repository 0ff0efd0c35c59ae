"""Coordinate network: fits an image from (x, y) with random Fourier features."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class FourierFeatures(nn.Module):
    def __init__(self, dims, n_freq, sigma):
        super().__init__()
        self.register_buffer("freqs", torch.randn(dims, n_freq) * sigma)

    def forward(self, x):
        phase = 2 * math.pi * x @ self.freqs
        return torch.cat([phase.sin(), phase.cos()], dim=-1)


class CoordinateNet(nn.Module):
    def __init__(self, n_freq=32, width=64, sigma=2.0):
        super().__init__()
        self.encode = FourierFeatures(2, n_freq, sigma)
        self.net = nn.Sequential(nn.Linear(2 * n_freq, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, xy):
        return self.net(self.encode(xy)).squeeze(-1)


def picture(size):
    axis = torch.linspace(0, 1, size)
    yy, xx = torch.meshgrid(axis, axis, indexing="ij")
    value = torch.sin(9 * xx) * torch.cos(7 * yy) + ((xx - 0.5) ** 2 + (yy - 0.4) ** 2 < 0.06).float()
    return torch.stack([xx, yy], -1).reshape(-1, 2), value.reshape(-1)


def pixel_batches(n, batch, steps, seed):
    gen = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(0, n, (batch,), generator=gen)


def psnr(model, xy, value, rank, world):
    with torch.no_grad():
        err = (model(xy[rank::world]) - value[rank::world]).pow(2)
    total = torch.tensor([err.sum().item(), float(len(err))])
    dist.all_reduce(total)
    return -10 * math.log10(total[0] / total[1])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=150)
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--size", type=int, default=48)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(args.seed + rank)  # pixels differ by rank; DDP makes the weights equal
    model = DDP(CoordinateNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)
    xy, value = picture(args.size)

    for step, pick in enumerate(pixel_batches(len(xy), args.batch, args.steps, args.seed * 100 + rank)):
        loss = nn.functional.mse_loss(model(xy[pick]), value[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0:
            quality = psnr(model, xy, value, rank, world)
            if rank == 0:
                print(f"step {step + 1}: PSNR {quality:.2f} dB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
