"""Denoising diffusion on two interleaved half moons."""
import argparse
import math
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def moons(n=800):
    g = torch.Generator().manual_seed(70)
    t = math.pi * torch.rand(n, generator=g)
    side = torch.randint(0, 2, (n,), generator=g).float()
    x = torch.stack([t.cos() * (1 - 2 * side) + side, t.sin() * (1 - 2 * side) + 0.3 * side], 1)
    return TensorDataset(x + 0.05 * torch.randn(n, 2, generator=g))


class Denoiser(nn.Module):
    def __init__(self, steps, width=96):
        super().__init__()
        self.time = nn.Embedding(steps, 16)
        self.net = nn.Sequential(
            nn.Linear(18, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))


class Diffusion:
    def __init__(self, steps):
        beta = torch.linspace(1e-4, 0.06, steps)
        self.steps = steps
        self.alpha_bar = torch.cumprod(1 - beta, 0)

    def loss(self, model, x0):
        t = torch.randint(0, self.steps, (len(x0),))
        eps = torch.randn_like(x0)
        a = self.alpha_bar[t].unsqueeze(1)
        xt = a.sqrt() * x0 + (1 - a).sqrt() * eps
        return nn.functional.mse_loss(model(xt, t), eps)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=1234)
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=50)
    ap.add_argument("--diffusion-steps", type=int, default=60)
    cfg = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    set_seed(cfg.seed)

    diffusion = Diffusion(cfg.diffusion_steps)
    model = DDP(Denoiser(cfg.diffusion_steps))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = moons()
    sampler = DistributedSampler(data, seed=cfg.seed)
    loader = DataLoader(data, batch_size=cfg.batch_size, sampler=sampler)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        mean = torch.zeros(1)
        for (x0,) in loader:
            loss = diffusion.loss(model, x0)
            opt.zero_grad()
            loss.backward()
            opt.step()
            mean += loss.detach() / len(loader)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item() / world:.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "denoiser.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
