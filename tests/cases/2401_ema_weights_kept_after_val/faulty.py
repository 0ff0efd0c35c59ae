import copy
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    n_train: int = 2048
    n_val: int = 512
    batch_size: int = 64
    epochs: int = 6
    lr: float = 2e-3
    ema_decay: float = 0.99
    timesteps: int = 50
    val_every: int = 16
    seed: int = 5


class EMAModel:
    """Shadow copy of the weights, in the style of the well known diffusion trainers."""

    def __init__(self, parameters, decay):
        self.decay = decay
        self.shadow = [p.detach().clone() for p in parameters]
        self.stash = None

    @torch.no_grad()
    def step(self, parameters):
        for s, p in zip(self.shadow, parameters):
            s.lerp_(p.detach(), 1.0 - self.decay)

    def store(self, parameters):
        self.stash = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def copy_to(self, parameters):
        for s, p in zip(self.shadow, parameters):
            p.copy_(s)

    @torch.no_grad()
    def restore(self, parameters):
        for s, p in zip(self.stash, parameters):
            p.copy_(s)
        self.stash = None


class Denoiser(nn.Module):
    def __init__(self, timesteps, width=96):
        super().__init__()
        self.temb = nn.Embedding(timesteps, width)
        self.inp = nn.Linear(2, width)
        self.mid = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        h = self.inp(x) + self.temb(t)
        return self.out(F.silu(h + self.mid(h)))


def ring(n, seed):
    g = torch.Generator().manual_seed(seed)
    a = 2 * math.pi * torch.rand(n, generator=g)
    r = 1.0 + 0.05 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([r * a.cos(), r * a.sin()], dim=1))


def corrupt(x, alphas, gen):
    t = torch.randint(0, len(alphas), (len(x),), generator=gen)
    noise = torch.randn(x.shape, generator=gen)
    a = alphas[t].unsqueeze(1)
    return a.sqrt() * x + (1 - a).sqrt() * noise, t, noise


@torch.no_grad()
def validate(net, ema, loader, alphas, rank):
    ema.store(net.parameters())
    ema.copy_to(net.parameters())
    net.eval()
    gen = torch.Generator().manual_seed(900 + rank)
    acc = torch.zeros(2, dtype=torch.float64)
    for (x,) in loader:
        xt, t, noise = corrupt(x, alphas, gen)
        acc[0] += F.mse_loss(net(xt, t), noise, reduction="sum").double()
        acc[1] += noise.numel()
    dist.all_reduce(acc)
    net.train()
    return (acc[0] / acc[1]).item()


def main():
    cfg = Config()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(cfg.seed)

    net = Denoiser(cfg.timesteps)
    model = DDP(net)
    ema = EMAModel(net.parameters(), cfg.ema_decay)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.15, cfg.timesteps), 0)

    train_ds, val_ds = ring(cfg.n_train, 1), ring(cfg.n_val, 2)
    sampler = DistributedSampler(train_ds, shuffle=True, seed=cfg.seed)
    loader = DataLoader(train_ds, batch_size=cfg.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_ds, batch_size=128, sampler=DistributedSampler(val_ds, shuffle=False))

    noise_gen = torch.Generator().manual_seed(1000 * cfg.seed + rank)
    step = 0
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.float64)
        for (x,) in loader:
            xt, t, noise = corrupt(x, alphas, noise_gen)
            loss = F.mse_loss(model(xt, t), noise)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            ema.step(net.parameters())
            step += 1
            total += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
            if step % cfg.val_every == 0:
                val = validate(net, ema, val_loader, alphas, rank)
                if rank == 0:
                    print(f"step {step} ema val {val:.4f}")
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} train {total[0] / total[1]:.4f}")

    if rank == 0:
        os.makedirs("out", exist_ok=True)
        ema_net = copy.deepcopy(net)
        ema.copy_to(ema_net.parameters())
        torch.save({"model": net.state_dict(), "ema": ema_net.state_dict(), "optimizer": opt.state_dict()}, "out/last.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
