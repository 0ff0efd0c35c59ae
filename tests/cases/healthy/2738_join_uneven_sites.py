import argparse
import csv
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Cfg:
    rows: int = 3000
    features: int = 20
    epochs: int = 6
    batch: int = 32
    lr: float = 0.05
    out: str = "join_out"


def hospital_tables(cfg, rank, world):
    """Each process owns the rows of its own site; the sites have unlike sizes."""
    g = torch.Generator().manual_seed(21)
    w1 = torch.randn(cfg.features, 8, generator=g)
    w2 = torch.randn(8, generator=g)
    x = torch.randn(cfg.rows, cfg.features, generator=g)
    y = torch.tanh(x @ w1 / 3) @ w2 + 0.1 * torch.randn(cfg.rows, generator=g)
    test = (x[-400:], y[-400:])
    x, y = x[:-400], y[:-400]
    cut = int(len(x) * 0.58)
    mine = (x[:cut], y[:cut]) if rank == 0 else (x[cut:], y[cut:])
    return mine, test


class Regressor(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(f, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
                                 nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(3)
        self.model = DDP(Regressor(cfg.features))
        # stateless on purpose: a site that has run out of rows takes no steps of its own until the next pass
        self.opt = torch.optim.SGD(self.model.parameters(), lr=cfg.lr, weight_decay=1e-4)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, step_size=3, gamma=0.3)
        self.gen = torch.Generator().manual_seed(100 + self.rank)
        (self.x, self.y), self.test = hospital_tables(cfg, self.rank, self.world)

    def batches(self):
        perm = torch.randperm(len(self.x), generator=self.gen)
        for ix in perm.split(self.cfg.batch):
            yield self.x[ix], self.y[ix]

    def train_epoch(self):
        self.model.train()
        total = steps = 0
        with Join([self.model]):
            for x, y in self.batches():
                self.opt.zero_grad()
                loss = nn.functional.mse_loss(self.model(x), y)
                loss.backward()
                self.opt.step()
                total += loss.item() * len(x)
                steps += 1
        return total, steps

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        x, y = self.test
        x, y = x[self.rank::self.world], y[self.rank::self.world]
        pred = self.model.module(x)
        s = torch.stack([((pred - y) ** 2).sum(), torch.tensor(float(len(y)))])
        dist.all_reduce(s)
        return (s[0] / s[1]).item()

    def checkpoint(self, epoch):
        if self.rank == 0:
            torch.save({"epoch": epoch, "model": self.model.module.state_dict(), "optim": self.opt.state_dict(),
                        "sched": self.sched.state_dict()}, os.path.join(self.cfg.out, "last.pt"))
        dist.barrier()

    def fit(self):
        rows = []
        for epoch in range(self.cfg.epochs):
            total, steps = self.train_epoch()
            self.sched.step()
            s = torch.tensor([total, float(len(self.x))])
            dist.all_reduce(s)
            counts = [None] * self.world
            dist.all_gather_object(counts, steps)
            mse = self.evaluate()
            if self.rank == 0:
                rows.append([epoch, (s[0] / s[1]).item(), mse, counts])
                print(rows[-1], flush=True)
            if epoch % 2 == 1:
                self.checkpoint(epoch)
        if self.rank == 0:
            with open(os.path.join(self.cfg.out, "history.csv"), "w", newline="") as f:
                csv.writer(f).writerows(rows)


def main():
    dist.init_process_group("gloo")
    cfg = Cfg()
    if dist.get_rank() == 0:
        os.makedirs(cfg.out, exist_ok=True)
    Trainer(cfg).fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
