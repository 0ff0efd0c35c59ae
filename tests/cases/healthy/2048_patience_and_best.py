"""Forecasting with early stopping: rank 0 alone scores the whole validation part and tells the others what to do."""
import copy
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Plan:
    epochs: int = 12
    patience: int = 3
    batch: int = 16
    pieces: int = 2
    lr: float = 5e-3
    past: int = 36
    ahead: int = 6


class Windows(Dataset):
    def __init__(self, series, plan):
        self.series, self.plan = series, plan

    def __len__(self):
        return len(self.series) - self.plan.past - self.plan.ahead + 1

    def __getitem__(self, i):
        middle = i + self.plan.past
        return self.series[i:middle], self.series[middle : middle + self.plan.ahead]


def demand(hours=1000):
    gen = torch.Generator().manual_seed(30)
    t = torch.arange(hours).float()
    day, week = torch.sin(t * 2 * math.pi / 24), torch.cos(t * 2 * math.pi / 168)
    return day * (1 + 0.3 * week) + 0.4 * week + 0.15 * torch.randn(hours, generator=gen)


class Forecaster(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(plan.past, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, plan.ahead))

    def forward(self, past):
        level = past.mean(1, keepdim=True)
        return self.net(past - level) + level


@torch.no_grad()
def score(net, loader):
    net.eval()
    total, count = 0.0, 0
    for past, future in loader:
        total += F.l1_loss(net(past), future, reduction="sum").item()
        count += future.numel()
    net.train()
    return total / count


def train_epoch(model, loader, optimizer, pieces):
    """Each batch in pieces; only the last piece's backward syncs, and the step comes after it."""
    for past, future in loader:
        optimizer.zero_grad()
        parts = list(zip(past.chunk(pieces), future.chunk(pieces)))
        with model.no_sync():
            for a, b in parts[:-1]:
                (F.mse_loss(model(a), b) * len(a) / len(past)).backward()
        a, b = parts[-1]
        (F.mse_loss(model(a), b) * len(a) / len(past)).backward()
        optimizer.step()


def main():
    plan = Plan()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(15)
    series = demand()
    train_set, valid_set = Windows(series[:760], plan), Windows(series[760:], plan)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    loader = DataLoader(train_set, plan.batch, sampler=sampler, drop_last=True)
    valid_loader = DataLoader(valid_set, 64)
    net = Forecaster(plan)
    model = DistributedDataParallel(net)
    torch.manual_seed(200 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=plan.lr)
    best, best_state, waited = math.inf, copy.deepcopy(net.state_dict()), 0

    for epoch in range(plan.epochs):
        sampler.set_epoch(epoch)
        model.train()
        train_epoch(model, loader, optimizer, plan.pieces)
        verdict = torch.zeros(1)
        if rank == 0:
            verdict[0] = score(net, valid_loader)
        dist.broadcast(verdict, src=0)
        if verdict.item() < best - 1e-4:
            best, best_state, waited = verdict.item(), copy.deepcopy(net.state_dict()), 0
        else:
            waited += 1
        if rank == 0:
            print(f"epoch {epoch}: validation error {verdict.item():.4f} (best {best:.4f})", flush=True)
        if waited >= plan.patience:
            break

    net.load_state_dict(best_state)
    if rank == 0:
        torch.save(net.state_dict(), "best.pt")
        Path("plan.json").write_text(json.dumps(asdict(plan) | {"best": best, "epochs_run": epoch + 1}))
        print(f"kept {best:.4f}, again {score(net, valid_loader):.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
