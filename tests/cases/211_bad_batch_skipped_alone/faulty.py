"""Sensor regression. Some recordings are broken (NaN); a batch that holds one is skipped."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def recordings(n=384, broken=(37, 200, 310)):
    g = torch.Generator().manual_seed(2)
    x = torch.randn(n, 8, generator=g)
    y = (x[:, :2].prod(1) + x[:, 2]).unsqueeze(1)
    x[list(broken), 3] = float("nan")
    return TensorDataset(x, y)


def train_epoch(model, loader, opt, criterion):
    skipped = 0
    total, n = 0.0, 0
    for x, y in loader:
        loss = criterion(model(x), y)
        if not torch.isfinite(loss):
            skipped += 1
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
        total, n = total + loss.item(), n + 1
    stats = torch.tensor([total, float(n), float(skipped)])
    dist.all_reduce(stats)
    return stats


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--bs", type=int, default=12)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = recordings()
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, args.bs, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        s = train_epoch(model, loader, opt, nn.MSELoss())
        if rank == 0:
            print(f"epoch {epoch}: mse {(s[0] / s[1]).item():.4f}, skipped {int(s[2])} rank-batches")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
