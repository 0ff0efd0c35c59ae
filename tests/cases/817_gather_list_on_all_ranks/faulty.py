"""Per-sample losses are collected on rank 0 for a histogram."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def plane(n=256):
    g = torch.Generator().manual_seed(39)
    x = torch.randn(n, 5, generator=g)
    w = torch.randn(5, 1, generator=g)
    return TensorDataset(x, x @ w + 0.3 * torch.randn(n, 1, generator=g))


def collect(values, rank, world):
    values = torch.cat(values)
    parts = [torch.empty_like(values) for _ in range(world)]
    dist.gather(values, gather_list=parts, dst=0)
    return torch.cat(parts) if rank == 0 else None


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--bins", type=int, default=6)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DDP(nn.Linear(5, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    data = plane()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = []
        for x, y in loader:
            each = (model(x) - y).pow(2).squeeze(1)
            opt.zero_grad()
            each.mean().backward()
            opt.step()
            losses.append(each.detach())
        everything = collect(losses, rank, world)
        if rank == 0:
            counts = torch.histc(everything, bins=args.bins, min=0, max=3).int().tolist()
            print(f"epoch {epoch}: mean {everything.mean().item():.4f} histogram {counts}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
