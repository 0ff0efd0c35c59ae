"""Budgeted training: the rate decays with the time that is left, not with the step count."""
import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Budget:
    """Fraction of the allowed time that is used up."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.start = time.perf_counter()

    def used(self):
        used = torch.tensor(min(1.0, (time.perf_counter() - self.start) / self.seconds), dtype=torch.float64)
        dist.broadcast(used, src=0)
        return used.item()


class BudgetedLR:
    def __init__(self, optimizer, budget, floor=0.05):
        self.optimizer, self.budget, self.floor = optimizer, budget, floor
        self.base = [g["lr"] for g in optimizer.param_groups]

    def factor(self):
        used = self.budget.used()
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * used))

    def step(self):
        factor = self.factor()
        for group, base in zip(self.optimizer.param_groups, self.base):
            group["lr"] = base * factor
        return factor


def spectra(n=480):
    gen = torch.Generator().manual_seed(23)
    label = torch.randint(0, 4, (n,), generator=gen)
    peaks = torch.linspace(0, 1, 64)[None]
    centre = 0.2 + 0.2 * label[:, None] + 0.04 * torch.randn(n, 1, generator=gen)
    x = torch.exp(-((peaks - centre) ** 2) / 0.004) + 0.2 * torch.randn(n, 64, generator=gen)
    return TensorDataset(x[:, None], label)


def network():
    return nn.Sequential(
        nn.Conv1d(1, 8, 7, padding=3), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(8, 16, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4),
        nn.Flatten(), nn.Linear(64, 4),
    )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--budget", type=float, default=4.0, help="seconds until the rate reaches its floor")
    args = ap.parse_args()
    budget = Budget(args.budget)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(4)
    model = DDP(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    schedule = BudgetedLR(optimizer, budget)
    data = spectra()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        totals = torch.zeros(2)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            factor = schedule.step()
            optimizer.step()
            totals += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(totals)
        if rank == 0:
            print(f"epoch {epoch}: loss {totals[0] / totals[1]:.4f}, rate x {factor:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
