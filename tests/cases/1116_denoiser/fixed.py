"""Denoising diffusion on 2-D points."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def moons(n=512):
    g = torch.Generator().manual_seed(70)
    phi = math.pi * torch.rand(n, generator=g)
    upper = torch.rand(n, generator=g) < 0.5
    x = torch.where(upper, phi.cos(), 1 - phi.cos())
    y = torch.where(upper, phi.sin(), 0.5 - phi.sin())
    return TensorDataset(torch.stack([x, y], 1) + 0.05 * torch.randn(n, 2, generator=g))


class NoiseModel(nn.Module):
    def __init__(self, steps, width=64):
        super().__init__()
        self.time = nn.Embedding(steps, width)
        self.inp = nn.Linear(2, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        h = torch.relu(self.inp(x) + self.time(t))
        return self.out(torch.relu(self.mid(h)))


class Diffusion:
    def __init__(self, steps=50):
        self.steps = steps
        self.alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.1, steps), 0)

    def loss(self, model, x0):
        t = torch.randint(0, self.steps, (len(x0),))
        noise = torch.randn_like(x0)
        a = self.alpha_bar[t].unsqueeze(1)
        return nn.functional.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])

    torch.manual_seed(args.seed)
    diffusion = Diffusion()
    model = DDP(NoiseModel(diffusion.steps))
    torch.manual_seed(args.seed + 1 + rank)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = moons()
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for (x0,) in loader:
            loss = diffusion.loss(model, x0)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: noise mse {(total[0] / total[1]).item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
