"""Forecasting with a plateau schedule; the second half of the validation series is a much noisier period."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

WINDOW, EPOCHS = 12, 8


def windows(n, seed, noise):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(n + WINDOW, dtype=torch.float32)
    level = noise[0] + (noise[1] - noise[0]) * (t > (n + WINDOW) / 2)
    series = torch.sin(t / 4) + 0.5 * torch.sin(t / 9) + level * torch.randn(len(t), generator=g)
    x = series.unfold(0, WINDOW, 1)[:n]
    return TensorDataset(x, series[WINDOW : WINDOW + n].unsqueeze(1))


@torch.no_grad()
def mean_error(model, loader):
    model.eval()
    s = torch.zeros(2)
    for x, y in loader:
        s += torch.tensor([nn.functional.l1_loss(model(x), y, reduction="sum").item(), len(x)])
    model.train()
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(12)
    model = DDP(nn.Sequential(nn.Linear(WINDOW, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.02)
    train = windows(192, 1, (0.1, 0.1))
    valid = windows(80, 2, (0.05, 1.5))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16, sampler=sampler)
    half = len(valid) // world
    valid_loader = DataLoader(Subset(valid, range(rank * half, (rank + 1) * half)), 20)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.l1_loss(model(x), y).backward()
            optimizer.step()
        error = mean_error(model.module, valid_loader)
        scheduler.step(error)
        print(f"[rank {rank}] epoch {epoch} validation error {error:.4f} lr {optimizer.param_groups[0]['lr']:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
