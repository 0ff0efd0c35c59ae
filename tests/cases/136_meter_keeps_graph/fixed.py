"""Compressing long spectra; loss and mean absolute error are shown as running averages."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CHANNELS = 5000


class AverageMeter:
    """Average over everything it was given since it was made."""

    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    def over_ranks(self):
        pair = torch.tensor([float(self.sum), float(self.count)], dtype=torch.float64)
        dist.all_reduce(pair)
        return (pair[0] / pair[1]).item()


class SpectrumNet(nn.Module):
    def __init__(self, code=10):
        super().__init__()
        self.down, self.up = nn.Linear(CHANNELS, code), nn.Linear(code, CHANNELS)

    def forward(self, x):
        return self.up(torch.tanh(self.down(x)))


class SpectrumSource:
    """Mixtures of five fixed lines, drawn by each rank for itself."""

    def __init__(self, seed, batch):
        axis = torch.linspace(0, 1, CHANNELS)
        mid = torch.tensor([0.15, 0.3, 0.5, 0.62, 0.85]).unsqueeze(1)
        self.lines = torch.exp(-(((axis - mid) / 0.05) ** 2))
        self.gen, self.batch = torch.Generator().manual_seed(seed), batch

    def next(self):
        amount = torch.rand(self.batch, 5, generator=self.gen)
        return amount @ self.lines


class Trainer:
    def __init__(self, steps, batch, show_every):
        self.rank = int(os.environ["RANK"])
        self.steps, self.show_every = steps, show_every
        torch.manual_seed(0)
        self.model = DDP(SpectrumNet())
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.source = SpectrumSource(seed=50 + self.rank, batch=batch)
        self.mse, self.mae = AverageMeter("mse"), AverageMeter("mae")

    def step(self):
        x = self.source.next()
        y = self.model(x)
        loss = nn.functional.mse_loss(y, x)
        mae = (y - x).abs().mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.mse.update(loss.item(), len(x))
        self.mae.update(mae.item(), len(x))

    def run(self):
        for k in range(1, self.steps + 1):
            self.step()
            if k % self.show_every == 0:
                text = ", ".join(f"{m.name} {m.over_ranks():.5f}" for m in (self.mse, self.mae))
                if self.rank == 0:
                    print(f"step {k}: {text}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(steps=240, batch=32, show_every=60).run()
    dist.destroy_process_group()
