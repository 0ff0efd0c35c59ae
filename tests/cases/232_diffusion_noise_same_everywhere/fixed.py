"""A small denoising diffusion model on 2-d points."""
import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--train-batch-size", type=int, default=32)
    p.add_argument("--num-timesteps", type=int, default=50)
    p.add_argument("--lr", type=float, default=2e-3)
    return p.parse_args()


class NoiseSchedule:
    def __init__(self, n):
        betas = torch.linspace(1e-4, 0.1, n)
        self.alpha_bar = torch.cumprod(1 - betas, 0)
        self.n = n

    def add_noise(self, x0, noise, t):
        a = self.alpha_bar[t].unsqueeze(1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.register_buffer("freq", torch.exp(torch.arange(8) * (-math.log(1000.0) / 7)), persistent=False)
        self.net = nn.Sequential(nn.Linear(2 + 16, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2))

    def forward(self, x, t):
        angle = t.float().unsqueeze(1) * self.freq
        return self.net(torch.cat([x, angle.sin(), angle.cos()], 1))


def dino(n=512):
    g = torch.Generator().manual_seed(0)
    a = 6.2832 * torch.rand(n, generator=g)
    r = 1 + 0.3 * torch.sin(5 * a)
    return TensorDataset(torch.stack([r * a.cos(), r * a.sin()], 1) + 0.02 * torch.randn(n, 2, generator=g))


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(args.seed + rank)
    schedule = NoiseSchedule(args.num_timesteps)
    model = DDP(Denoiser(), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = dino()
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, args.train_batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros(2)
        for (x0,) in loader:
            noise = torch.randn_like(x0)
            timesteps = torch.randint(0, schedule.n, (len(x0),))
            noisy = schedule.add_noise(x0, noise, timesteps)
            loss = nn.functional.mse_loss(model(noisy, timesteps), noise)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(losses)
        if rank == 0:
            print(f"epoch {epoch}: loss {(losses[0] / losses[1]).item():.4f} ({world} processes)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
