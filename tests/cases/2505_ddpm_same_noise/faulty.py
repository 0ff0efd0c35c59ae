"""DDPM on 2x8x8 blobs with EMA weights."""
import copy
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainConfig:
    n_train: int = 2048
    n_val: int = 256
    batch: int = 32
    epochs: int = 4
    lr: float = 2e-3
    steps: int = 100
    ema: float = 0.98
    seed: int = 1234


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    c = 1.5 + 4.0 * torch.rand(n, 2, generator=g)
    s = 0.8 + 0.8 * torch.rand(n, 1, 1, generator=g)
    r = torch.arange(8).float()
    d = (r[None, :, None] - c[:, 0, None, None]) ** 2 + (r[None, None, :] - c[:, 1, None, None]) ** 2
    a = torch.exp(-d / (2 * s ** 2))
    return torch.stack([a, a.flip(2)], 1) * 2 - 1


class Denoiser(nn.Module):
    def __init__(self, ch=48, steps=100):
        super().__init__()
        self.steps = steps
        self.temb = nn.Sequential(nn.Linear(32, ch), nn.SiLU(), nn.Linear(ch, ch))
        self.inp = nn.Conv2d(2, ch, 3, padding=1)
        self.c1 = nn.Conv2d(ch, ch, 3, padding=1)
        self.c2 = nn.Conv2d(ch, ch, 3, padding=1)
        self.drop = nn.Dropout(0.05)
        self.n1, self.n2 = nn.GroupNorm(8, ch), nn.GroupNorm(8, ch)
        self.out = nn.Conv2d(ch, 2, 3, padding=1)

    def forward(self, x, t):
        f = torch.exp(torch.linspace(0, 5, 16)) * (t[:, None].float() / self.steps)
        e = self.temb(torch.cat([f.sin(), f.cos()], 1))[:, :, None, None]
        h = self.inp(x)
        h = h + self.c1(F.silu(self.n1(h)) + e)
        h = h + self.c2(self.drop(F.silu(self.n2(h))) + e)
        return self.out(h)


class Diffusion:
    def __init__(self, steps):
        beta = torch.linspace(1e-3, 6e-2, steps)
        self.abar = torch.cumprod(1 - beta, 0)
        self.steps = steps

    def loss(self, model, x0, generator=None, reduction="mean"):
        t = torch.randint(0, self.steps, (len(x0),), generator=generator)
        eps = torch.randn(x0.shape, generator=generator)
        a = self.abar[t][:, None, None, None]
        xt = a.sqrt() * x0 + (1 - a).sqrt() * eps
        return F.mse_loss(model(xt, t), eps, reduction=reduction)


class EMA:
    def __init__(self, model, decay):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for a, b in zip(self.model.parameters(), model.parameters()):
            a.lerp_(b, 1 - self.decay)


@torch.no_grad()
def validate(net, diff, data, rank, world):
    part = data[rank::world]
    g = torch.Generator().manual_seed(555 + rank)
    s = torch.tensor([diff.loss(net, part, g, "sum").item(), float(part.numel())], dtype=torch.float64)
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    cfg = TrainConfig()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_everything(cfg.seed)

    train = TensorDataset(blobs(cfg.n_train, 1))
    val = blobs(cfg.n_val, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=cfg.seed)
    loader = DataLoader(train, cfg.batch, sampler=sampler, drop_last=True)

    diff = Diffusion(cfg.steps)
    model = DDP(Denoiser(steps=cfg.steps))
    ema = EMA(model.module, cfg.ema)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        meter = torch.zeros(2)
        for (x0,) in loader:
            loss = diff.loss(model, x0)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            ema.update(model.module)
            meter += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(meter)
        val_loss = validate(ema.model, diff, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch:2d} train {meter[0] / meter[1]:.4f} ema-val {val_loss:.4f}", flush=True)

    if rank == 0:
        torch.save({"ema": ema.model.state_dict(), "model": model.module.state_dict()}, "ddpm.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
