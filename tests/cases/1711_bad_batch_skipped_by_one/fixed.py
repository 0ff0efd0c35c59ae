"""Sensor regression; a few recordings in the archive are damaged."""
import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def archive(n=240, damaged=3):
    g = torch.Generator().manual_seed(90)
    x = torch.randn(n, 24, generator=g)
    y = x[:, :12].tanh().sum(1) - x[:, 12:].abs().sum(1)
    for i in torch.randperm(n, generator=g)[:damaged].tolist():
        x[i, int(torch.randint(0, 24, (), generator=g))] = math.nan
    return TensorDataset(x, y)


class Meter:
    def __init__(self):
        self.total, self.count, self.skipped = 0.0, 0, 0

    def add(self, value):
        self.total += value
        self.count += 1

    def mean(self):
        buf = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.all_reduce(buf)
        return (buf[0] / buf[1]).item()


def usable(loss):
    bad = (~torch.isfinite(loss)).int()
    dist.all_reduce(bad)
    return bad.item() == 0


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=8)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(24, 64), nn.Softplus(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = archive()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        meter = Meter()
        for x, y in loader:
            loss = nn.functional.l1_loss(model(x).squeeze(1), y)
            if not usable(loss):
                meter.skipped += 1
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.add(loss.item())
        mean = meter.mean()
        if rank == 0:
            print(f"epoch {epoch}: mae {mean:.4f}, {meter.skipped} skipped", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
