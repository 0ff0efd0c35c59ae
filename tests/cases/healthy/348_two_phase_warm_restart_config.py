"""Config tree in the manner of hydra: groups of defaults, overrides on the command line (a.b=c), a registry of parts."""
import math
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

DEFAULTS = """
seed=3
model.name=resmlp
model.width=32
model.depth=3
optim.name=adamw
optim.lr=0.004
optim.warmup=6
data.n=400
data.batch=20
trainer.epochs=4
trainer.log_every=10
"""
REGISTRY = {}


def register(name):
    def deco(f):
        REGISTRY[name] = f
        return f
    return deco


def parse(lines):
    cfg = SimpleNamespace()
    for line in filter(None, lines):
        key, raw = line.split("=", 1)
        *path, leaf = key.split(".")
        node = cfg
        for part in path:
            if not hasattr(node, part):
                setattr(node, part, SimpleNamespace())
            node = getattr(node, part)
        try:
            value = float(raw) if "." in raw or "e" in raw.lower() else int(raw)
        except ValueError:
            value = raw
        setattr(node, leaf, value)
    return cfg


@register("resmlp")
class ResMLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.stem = nn.Linear(5, c.width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(c.width), nn.Linear(c.width, c.width), nn.SiLU()) for _ in range(c.depth))
        self.out = nn.Linear(c.width, 1)

    def forward(self, x):
        h = self.stem(x)
        for b in self.blocks:
            h = h + b(h)
        return self.out(h)


@register("adamw")
def adamw(params, c):
    return torch.optim.AdamW(params, lr=c.lr, weight_decay=1e-3)


class Friedman(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.rand(n, 5, generator=g)
        x = self.x
        self.y = ((10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]) / 10).unsqueeze(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def run(cfg):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(cfg.seed)
    model = DDP(REGISTRY[cfg.model.name](cfg.model))
    opt = REGISTRY[cfg.optim.name](model.parameters(), cfg.optim)
    data = Friedman(cfg.data.n, 1)
    sampler = DistributedSampler(data, seed=cfg.seed)
    loader = DataLoader(data, cfg.data.batch, sampler=sampler)
    total = cfg.trainer.epochs * len(loader)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=cfg.optim.warmup)
    cosine = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=(total - cfg.optim.warmup) // 2)
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [warm, cosine], milestones=[cfg.optim.warmup])
    step, window = 0, torch.zeros(2)
    for epoch in range(cfg.trainer.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            step += 1
            window += torch.tensor([loss.item(), 1.0])
            if step % cfg.trainer.log_every == 0:
                dist.all_reduce(window)
                if rank == 0:
                    print(f"step {step}/{total} loss {(window[0] / window[1]).item():.4f} lr {opt.param_groups[0]['lr']:.5f}")
                window = torch.zeros(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(parse(DEFAULTS.split("\n") + [a for a in sys.argv[1:] if "=" in a]))
