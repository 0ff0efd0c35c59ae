"""Toy diffusion model: train on two moons, then draw samples in parallel into a folder."""
import argparse
import glob
import math
import os
import shutil

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def two_moons(n, gen):
    half = torch.rand(n, generator=gen) * math.pi
    side = torch.randint(2, (n,), generator=gen)
    x = torch.where(side == 0, half.cos(), 1 - half.cos())
    y = torch.where(side == 0, half.sin(), 0.5 - half.sin())
    return torch.stack([x - 0.5, y - 0.25], 1) + 0.05 * torch.randn(n, 2, generator=gen)


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 + 8, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
                                 nn.Linear(width, 2))
        self.register_buffer("bands", 2.0 ** torch.arange(4))

    def forward(self, x, t):
        phase = t[:, None] * self.bands
        return self.net(torch.cat([x, phase.sin(), phase.cos()], 1))


class Schedule:
    def __init__(self, steps):
        self.steps = steps
        self.beta = torch.linspace(1e-3, 0.12, steps)
        self.alpha_bar = torch.cumprod(1 - self.beta, 0)

    def add_noise(self, x, k, eps):
        a = self.alpha_bar[k][:, None]
        return a.sqrt() * x + (1 - a).sqrt() * eps

    @torch.no_grad()
    def sample(self, model, n):
        x = torch.randn(n, 2)
        for k in reversed(range(self.steps)):
            t = torch.full((n,), k / self.steps)
            eps = model(x, t)
            beta, bar = self.beta[k], self.alpha_bar[k]
            x = (x - beta / (1 - bar).sqrt() * eps) / (1 - beta).sqrt()
            if k:
                x = x + beta.sqrt() * torch.randn_like(x)
        return x


def stream(rank, batch):
    gen = torch.Generator().manual_seed(31 + rank)
    while True:
        yield two_moons(batch, gen)


def fit(model, schedule, data, steps, lr, rank):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    running = None
    for step, x in zip(range(1, steps + 1), data):
        k = torch.randint(schedule.steps, (len(x),))
        eps = torch.randn_like(x)
        loss = (model(schedule.add_noise(x, k, eps), k / schedule.steps) - eps).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        running = loss.detach() if running is None else 0.95 * running + 0.05 * loss.detach()
        if step % 100 == 0:
            shown = running.clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} eps-mse {shown.item() / dist.get_world_size():.4f}", flush=True)


def draw(model, schedule, folder, wanted, batch, rank, world):
    model.eval()
    rounds = math.ceil(wanted / (batch * world))
    written = 0
    for _ in range(rounds):
        points = schedule.sample(model, batch)
        for i, point in enumerate(points):
            index = (written + i) * world + rank
            np.save(os.path.join(folder, f"{index:06d}.npy"), point.numpy())
        written += batch


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=500)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--samples", type=int, default=512)
    ap.add_argument("--out", default="samples")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(60 + rank)

    if rank == 0:
        shutil.rmtree(args.out, ignore_errors=True)
        os.makedirs(args.out)
    dist.barrier()

    net = Denoiser()
    schedule = Schedule(50)
    ddp = DDP(net)
    fit(ddp, schedule, stream(rank, args.batch), args.steps, 2e-3, rank)
    draw(net, schedule, args.out, args.samples, 64, rank, world)
    dist.barrier()
    if rank == 0:
        points = np.stack([np.load(f) for f in sorted(glob.glob(os.path.join(args.out, "*.npy")))])
        np.savez("samples.npz", points)
        print(f"collected {len(points)} points, mean {points.mean(0).round(3)}, std {points.std(0).round(3)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
