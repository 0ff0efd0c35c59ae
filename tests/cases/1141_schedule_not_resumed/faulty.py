"""Sequence regression with warm-up and cosine, run in two parts."""
import dataclasses
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclasses.dataclass
class Config:
    total: int = 60
    warmup: int = 10
    batch: int = 16
    peak_lr: float = 4e-3
    path: str = "state/last.pt"


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


def series(step, rank, n):
    g = torch.Generator().manual_seed(100000 + 2 * step + rank)
    t = torch.arange(17.0)
    w = 0.2 + 0.6 * torch.rand(n, 1, generator=g)
    s = torch.sin(w * t + 6.28 * torch.rand(n, 1, generator=g))
    return s[:, :16, None], s[:, 16:]


class Run:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = dist.get_rank()
        torch.manual_seed(5)
        self.model = DDP(Forecaster())
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.peak_lr)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt, self.factor)
        self.step = 0

    def factor(self, step):
        if step < self.cfg.warmup:
            return (step + 1) / self.cfg.warmup
        done = (step - self.cfg.warmup) / (self.cfg.total - self.cfg.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def save(self):
        if self.rank == 0:
            os.makedirs(os.path.dirname(self.cfg.path), exist_ok=True)
            state = {"step": self.step, "model": self.model.module.state_dict(), "opt": self.opt.state_dict()}
            torch.save(state, self.cfg.path)
        dist.barrier()

    def resume(self):
        state = torch.load(self.cfg.path)
        self.step = state["step"]
        self.model.module.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        return self

    def train(self, until):
        while self.step < until:
            x, y = series(self.step, self.rank, self.cfg.batch)
            loss = nn.functional.mse_loss(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.sched.step()
            self.step += 1
            if self.rank == 0 and self.step % 10 == 0:
                print(f"step {self.step}: loss {loss.item():.4f} lr {self.opt.param_groups[0]['lr']:.2e}", flush=True)


def main():
    dist.init_process_group("gloo")
    cfg = Config()
    first = Run(cfg)
    first.train(until=30)
    first.save()
    del first
    Run(cfg).resume().train(until=cfg.total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
