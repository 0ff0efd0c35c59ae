"""One regressor over several weather variables' sources, with one loss curve per source."""
import argparse
import csv
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SOURCES = {"air_temperature": 0.1, "surface_pressure": 0.4, "specific_humidity": 1.0, "wind": 2.0}


class Mixture(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.names = list(SOURCES)
        self.source = torch.randint(0, len(self.names), (count,), generator=g)
        self.x = torch.randn(count, 10, generator=g)
        w = torch.randn(len(self.names), 10, generator=torch.Generator().manual_seed(77))
        level = torch.tensor(list(SOURCES.values()))[self.source]
        self.y = (self.x * w[self.source]).sum(1) + level * torch.randn(count, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.source[i], self.y[i]


class Regressor(nn.Module):
    def __init__(self, sources):
        super().__init__()
        self.embed = nn.Embedding(sources, 16)
        self.body = nn.Sequential(nn.Linear(26, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 1))

    def forward(self, x, source):
        return self.body(torch.cat([x, self.embed(source)], 1)).squeeze(-1)


class PerSourceLoss:
    """Accumulates a mean loss for every source met in the epoch."""

    def __init__(self):
        self.sums = {}

    def update(self, names, values):
        for name, value in zip(names, values.tolist()):
            entry = self.sums.setdefault(name, torch.zeros(2, dtype=torch.float64))
            entry += torch.tensor([value, 1.0], dtype=torch.float64)

    def get_logs(self, prefix):
        logs = {}
        for name, entry in self.sums.items():
            total = entry.clone()
            dist.all_reduce(total)
            logs[f"{prefix}/loss/{name}"] = (total[0] / total[1]).item()
        return logs


class Writer:
    def __init__(self, path):
        self.path, self.rows = path, []

    def add(self, epoch, logs):
        self.rows.extend((epoch, k, round(v, 6)) for k, v in logs.items())

    def close(self):
        with open(self.path, "w", newline="") as f:
            out = csv.writer(f)
            out.writerow(["epoch", "name", "value"])
            out.writerows(self.rows)


def run_epoch(model, loader, optimizer=None):
    meter = PerSourceLoss()
    names = loader.dataset.names
    train = optimizer is not None
    model.train(train)
    with torch.set_grad_enabled(train):
        for x, source, y in loader:
            err = (model(x, source) - y) ** 2
            if train:
                optimizer.zero_grad()
                err.mean().backward()
                optimizer.step()
            meter.update([names[s] for s in source.tolist()], err.detach())
    return meter


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=13)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    train_set, val_set = Mixture(2048, 1), Mixture(512, 2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    val_loader = DataLoader(val_set, 64, sampler=DistributedSampler(val_set, shuffle=False))
    model = DDP(Regressor(len(SOURCES)))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    writer = Writer("curves.csv") if rank == 0 else None

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_meter = run_epoch(model, train_loader, optimizer)
        val_meter = run_epoch(model.module, val_loader)
        scheduler.step()
        logs = {**train_meter.get_logs("train"), **val_meter.get_logs("val")}
        if writer is not None:
            writer.add(epoch, logs)
            print(epoch, {k: round(v, 3) for k, v in sorted(logs.items())}, flush=True)
    if writer is not None:
        writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
