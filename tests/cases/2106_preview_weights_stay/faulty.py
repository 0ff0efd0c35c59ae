"""Denoising diffusion on two-dimensional rings, with an exponential moving average used for previews."""
import argparse
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rings(Dataset):
    def __init__(self, n, seed=0):
        rng = np.random.default_rng(seed)
        angle, radius = rng.uniform(0, 2 * math.pi, n), rng.choice([0.5, 1.2], n) + 0.03 * rng.standard_normal(n)
        self.points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype("float32")

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        return torch.from_numpy(self.points[i])


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.register_buffer("freqs", 2.0 ** torch.arange(4))
        self.net = nn.Sequential(
            nn.Linear(2 + 8, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, x, t):
        phase = t[:, None] * self.freqs
        return self.net(torch.cat([x, phase.sin(), phase.cos()], 1))


class Diffusion:
    def __init__(self, steps=50):
        self.steps = steps
        self.betas = torch.linspace(1e-3, 0.15, steps)
        self.alpha_bar = torch.cumprod(1 - self.betas, 0)

    def loss(self, model, x0):
        t = torch.randint(0, self.steps, (len(x0),))
        noise = torch.randn_like(x0)
        ab = self.alpha_bar[t][:, None]
        pred = model(ab.sqrt() * x0 + (1 - ab).sqrt() * noise, t / self.steps)
        return (pred - noise).pow(2).mean()

    @torch.no_grad()
    def sample(self, model, n, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 2, generator=g)
        for i in reversed(range(self.steps)):
            eps = model(x, torch.full((n,), i / self.steps))
            x = (x - self.betas[i] / (1 - self.alpha_bar[i]).sqrt() * eps) / (1 - self.betas[i]).sqrt()
            if i:
                x = x + self.betas[i].sqrt() * torch.randn(n, 2, generator=g)
        return x


class EMA:
    def __init__(self, params, decay):
        self.decay = decay
        self.shadow = [p.detach().clone() for p in params]
        self.backup = None

    @torch.no_grad()
    def update(self, params):
        for s, p in zip(self.shadow, params):
            s.lerp_(p, 1 - self.decay)

    def store(self, params):
        self.backup = [p.detach().clone() for p in params]

    @torch.no_grad()
    def copy_to(self, params):
        for s, p in zip(self.shadow, params):
            p.copy_(s)

    @torch.no_grad()
    def restore(self, params):
        for b, p in zip(self.backup, params):
            p.copy_(b)
        self.backup = None


def preview(model, diffusion, epoch):
    model.eval()
    points = diffusion.sample(model, 256, seed=epoch)
    np.save(f"preview_{epoch}.npy", points.numpy())
    radius = points.norm(dim=1)
    model.train()
    return torch.minimum((radius - 0.5).abs(), (radius - 1.2).abs()).mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--decay", type=float, default=0.98)
    ap.add_argument("--preview-every", type=int, default=2)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Denoiser()
    model = DDP(net)
    torch.manual_seed(1000 + rank)
    ema = EMA(list(net.parameters()), args.decay)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    diffusion = Diffusion()
    data = Rings(3072)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x0 in loader:
            loss = diffusion.loss(model, x0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(net.parameters())
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / world:.4f}", flush=True)
            if (epoch + 1) % args.preview_every == 0:
                ema.store(net.parameters())
                ema.copy_to(net.parameters())
                print(f"  distance to the rings {preview(net, diffusion, epoch):.4f}", flush=True)

    if rank == 0:
        torch.save({"ema": ema.shadow, "model": net.state_dict()}, "diffusion.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
