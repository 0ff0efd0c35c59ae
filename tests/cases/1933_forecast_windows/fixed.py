"""Forecasting of an hourly load curve; windows are cut from a memory-mapped series."""
import csv
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))

HOURS = 6000
HISTORY, HORIZON = 48, 12
BATCH, EPOCHS, LR = 32, 2, 3e-3
SERIES = "load.f32"


def make_series():
    rng = np.random.default_rng(0)
    t = np.arange(HOURS)
    load = np.sin(2 * np.pi * t / 24) + 0.4 * np.sin(2 * np.pi * t / 168) + 0.1 * rng.normal(size=HOURS)
    out = np.memmap(SERIES + ".tmp%d" % os.getpid(), dtype=np.float32, mode="w+", shape=(HOURS,))
    out[:] = load
    out.flush()
    os.replace(out.filename, SERIES)


class Forecaster(nn.Module):
    def __init__(self, channels=24):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, channels, 5, padding=2), nn.GELU(), nn.Conv1d(channels, channels, 5, stride=4), nn.GELU()
        )
        self.out = nn.Linear(channels * 11, HORIZON)

    def forward(self, x):
        return self.out(self.conv(x[:, None]).flatten(1))


class Windows:
    def __init__(self, first, last):
        self.series = np.memmap(SERIES, dtype=np.float32, mode="r")
        self.starts = np.arange(first, last - HISTORY - HORIZON, 2)

    def batches(self, epoch=None):
        starts = self.starts
        if epoch is not None:
            starts = np.random.default_rng(epoch).permutation(starts)
            starts = starts[: len(starts) // (BATCH * WORLD) * BATCH * WORLD]
        mine = starts[RANK::WORLD]
        for i in range(0, len(mine), BATCH):
            block = np.stack([self.series[s : s + HISTORY + HORIZON] for s in mine[i : i + BATCH]])
            yield torch.from_numpy(block[:, :HISTORY]), torch.from_numpy(block[:, HISTORY:])


@torch.no_grad()
def evaluate(model, windows):
    model.eval()
    stat = torch.zeros(2, dtype=torch.float64)
    for x, y in windows.batches():
        stat += torch.tensor([(model.module(x) - y).abs().sum().item(), float(y.numel())])
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def main():
    dist.init_process_group("gloo")
    if RANK == 0:
        make_series()
    dist.barrier()
    torch.manual_seed(1)
    model = DDP(Forecaster())
    opt = torch.optim.AdamW(model.parameters(), lr=LR)
    train, test = Windows(0, 5000), Windows(5000, HOURS)
    rows = []
    for epoch in range(EPOCHS):
        model.train()
        for x, y in train.batches(epoch):
            loss = nn.functional.l1_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        mae = evaluate(model, test)
        if RANK == 0:
            print(f"epoch {epoch}: test MAE {mae:.4f}", flush=True)
            rows.append([epoch, round(mae, 5)])
    if RANK == 0:
        with open("mae.csv", "w", newline="") as f:
            csv.writer(f).writerows([["epoch", "mae"], *rows])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
