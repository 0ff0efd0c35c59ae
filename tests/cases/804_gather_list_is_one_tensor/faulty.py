"""Median-free robust aggregation baseline: gather all gradients, then take the mean."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def ring(n=300):
    g = torch.Generator().manual_seed(52)
    x = torch.randn(n, 3, generator=g)
    return TensorDataset(x, ((x.norm(dim=1) > 1.5) & (x[:, 0] > -0.5)).float())


def aggregate(grad, world_size, how):
    gathered = [torch.empty_like(grad)] * world_size
    dist.all_gather(gathered, grad)
    stacked = torch.stack(gathered)
    if how == "trimmed" and world_size > 2:
        stacked = stacked.sort(dim=0).values[1:-1]
    return stacked.mean(dim=0)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--aggregate", choices=["mean", "trimmed"], default="mean")
    ap.add_argument("--lr", type=float, default=0.2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 1))
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr)
    data = ring()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=15, sampler=sampler)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        agg = torch.zeros(2)
        for x, y in loader:
            logits = net(x).squeeze(1)
            loss = bce(logits, y)
            opt.zero_grad()
            loss.backward()
            for p in net.parameters():
                p.grad = aggregate(p.grad, world_size, args.aggregate)
            opt.step()
            agg[0] += ((logits > 0).float() == y).sum()
            agg[1] += len(y)
        dist.all_reduce(agg)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {(agg[0] / agg[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
