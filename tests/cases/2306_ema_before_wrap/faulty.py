#!/usr/bin/env python
"""Denoising diffusion on 2-D points. The averaged weights are the ones that are scored and kept."""
import argparse
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def two_spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = 0.5 + 2.5 * torch.rand(n, generator=g)
    side = torch.randint(0, 2, (n,), generator=g).float() * 2 - 1
    xy = torch.stack([t * torch.cos(2 * t), t * torch.sin(2 * t)], 1) * side.unsqueeze(1)
    return xy / 1.8 + 0.03 * torch.randn(n, 2, generator=g)


class NoiseSchedule:
    def __init__(self, steps):
        self.steps = steps
        s = torch.arange(steps + 1) / steps
        f = torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
        self.abar = (f / f[0]).clamp(1e-4, 0.9999)[1:]

    def corrupt(self, x, t, eps):
        a = self.abar[t].unsqueeze(1)
        return a.sqrt() * x + (1 - a).sqrt() * eps


class EpsNet(nn.Module):
    def __init__(self, steps, width):
        super().__init__()
        self.time = nn.Embedding(steps, width)
        self.inp = nn.Linear(2, width)
        self.mid = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(),
                                                nn.Linear(width, width)) for _ in range(3)])
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t)
        for block in self.mid:
            h = h + block(h)
        return self.out(h)


class Averaged:
    def __init__(self, net, decay):
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, net):
        for avg, cur in zip(self.net.parameters(), net.parameters()):
            avg.lerp_(cur.detach(), 1 - self.decay)


@torch.no_grad()
def score(net, points, schedule, rank, world):
    mine = points[rank::world]
    g = torch.Generator().manual_seed(555 + rank)
    t = torch.randint(0, schedule.steps, (len(mine),), generator=g)
    eps = torch.randn(mine.shape, generator=g)
    err = (net(schedule.corrupt(mine, t, eps), t) - eps).pow(2).mean(1)
    both = torch.stack([err.sum(), torch.tensor(float(len(mine)))])
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=50, help="diffusion steps")
    p.add_argument("--width", type=int, default=96)
    p.add_argument("--decay", type=float, default=0.99)
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=40)
    return p.parse_args()


def main():
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)

    schedule = NoiseSchedule(args.steps)
    train = TensorDataset(two_spirals(4096, seed=1))
    held_out = two_spirals(1000, seed=2)
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler, drop_last=True)

    net = EpsNet(args.steps, args.width)
    ema = Averaged(net, args.decay)
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(())
        for (x,) in loader:
            t = torch.randint(0, args.steps, (len(x),))
            eps = torch.randn_like(x)
            loss = (model(schedule.corrupt(x, t, eps), t) - eps).pow(2).mean()
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            ema.update(net)
            running += loss.detach()
        running /= len(loader)
        dist.all_reduce(running)
        now = score(ema.net, held_out, schedule, rank, world)
        if rank == 0:
            print(f"{epoch:02d} train {running.item() / world:.4f} held-out (averaged) {now:.4f}", flush=True)

    if rank == 0:
        os.makedirs("weights", exist_ok=True)
        torch.save({"net": net.state_dict(), "ema": ema.net.state_dict(), "args": vars(args)}, "weights/diffusion.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
