"""Small denoising diffusion model for points in the plane, with a preview after every epoch."""
import argparse
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    steps: int = 40
    epochs: int = 5
    batch_size: int = 32
    lr: float = 2e-3
    seed: int = 5
    preview: int = 64


def moons(n):
    g = torch.Generator().manual_seed(77)
    side = torch.randint(0, 2, (n,), generator=g).float()
    a = math.pi * torch.rand(n, generator=g)
    x = torch.stack([a.cos() + side, (1 - 2 * side) * a.sin() + 0.4 * side], 1)
    return TensorDataset(x + 0.05 * torch.randn(n, 2, generator=g))


class Denoiser(nn.Module):
    def __init__(self, steps, width=64):
        super().__init__()
        self.time = nn.Embedding(steps, width)
        self.enter = nn.Linear(2, width)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        return self.body(self.enter(x) + self.time(t))


class Diffusion:
    def __init__(self, steps):
        self.steps = steps
        self.beta = torch.linspace(1e-3, 0.15, steps)
        self.keep = torch.cumprod(1 - self.beta, 0)

    def add_noise(self, x, noise, t):
        k = self.keep[t].unsqueeze(1)
        return k.sqrt() * x + (1 - k).sqrt() * noise

    @torch.no_grad()
    def preview(self, net, count, seed):
        gen = torch.manual_seed(seed)
        x = torch.randn(count, 2, generator=gen)
        for t in reversed(range(self.steps)):
            eps = net(x, torch.full((count,), t))
            x = (x - self.beta[t] / (1 - self.keep[t]).sqrt() * eps) / (1 - self.beta[t]).sqrt()
            if t:
                x = x + self.beta[t].sqrt() * torch.randn(count, 2, generator=gen)
        return x


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=Config.epochs)
    cfg = Config(epochs=ap.parse_args().epochs)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])

    torch.manual_seed(cfg.seed)
    net = Denoiser(cfg.steps)
    model = DDP(net)
    torch.manual_seed(cfg.seed + 1 + rank)
    process = Diffusion(cfg.steps)
    data = moons(512)
    sampler = DistributedSampler(data, seed=cfg.seed)
    loader = DataLoader(data, batch_size=cfg.batch_size, sampler=sampler)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for (x,) in loader:
            noise = torch.randn_like(x)
            t = torch.randint(0, cfg.steps, (len(x),))
            loss = nn.functional.mse_loss(model(process.add_noise(x, noise, t), t), noise)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(total)
        points = process.preview(net, cfg.preview, seed=1234 + rank)
        spread = points.std(0)
        dist.all_reduce(spread)
        if rank == 0:
            spread = (spread / dist.get_world_size()).tolist()
            print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}, spread {spread[0]:.2f} {spread[1]:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
