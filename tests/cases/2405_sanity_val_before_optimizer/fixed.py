import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Forecaster(nn.Module):
    """MLP-mixer style forecaster: 48 past values -> 12 future values."""

    def __init__(self, history=48, horizon=12, width=64, depth=3):
        super().__init__()
        self.inp = nn.Linear(history, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, horizon)

    def forward(self, x):
        h = self.inp(x)
        for blk in self.blocks:
            h = blk(h)
        return self.out(h)


def make_series(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(60.0)
    freq = 0.1 + 0.4 * torch.rand(n, 1, generator=g)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    amp = 0.5 + torch.rand(n, 1, generator=g)
    y = amp * torch.sin(freq * t + phase) + 0.05 * torch.randn(n, 60, generator=g)
    return TensorDataset(y[:, :48], y[:, 48:])


@torch.no_grad()
def validate(model, loader):
    model.eval()
    acc = torch.zeros(2, dtype=torch.float64)
    for x, y in loader:
        pred = model(x)
        acc[0] += F.mse_loss(pred, y, reduction="sum").double()
        acc[1] += y.numel()
    dist.all_reduce(acc)
    model.train()
    return (acc[0] / acc[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)

    train_ds, val_ds = make_series(1536, seed=1), make_series(512, seed=2)
    sampler = DistributedSampler(train_ds, shuffle=True, seed=11, drop_last=True)
    train_loader = DataLoader(train_ds, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    val_sampler = DistributedSampler(val_ds, shuffle=False)
    val_loader = DataLoader(val_ds, batch_size=64, sampler=val_sampler)

    mesh = init_device_mesh("cpu", (world,))
    model = Forecaster()
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh)

    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    no_decay = [p for n, p in model.named_parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}], lr=args.lr
    )

    baseline = validate(model, val_loader)
    if rank == 0:
        print(f"before training: val mse {baseline:.4f}")

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(2, dtype=torch.float64)
        for x, y in train_loader:
            loss = F.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            running += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
        dist.all_reduce(running)
        val = validate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch} train {running[0] / running[1]:.4f} val mse {val:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
