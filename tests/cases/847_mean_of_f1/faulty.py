"""Rare-event detection, F1 on a distributed validation set."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def events(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, (x[:, 0] + 0.5 * x[:, 1] ** 2 + 0.3 * torch.randn(n, generator=g) > 1.6).float())


@torch.no_grad()
def f1_score(net, data, rank, world):
    net.eval()
    x, y = (t[rank::world] for t in data.tensors)
    pred = (net(x).squeeze(1) > 0).float()
    tp = (pred * y).sum()
    fp = (pred * (1 - y)).sum()
    fn = ((1 - pred) * y).sum()
    net.train()
    f1 = 2 * tp / (2 * tp + fp + fn).clamp(min=1)
    dist.all_reduce(f1)
    return (f1 / world).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    train_set, val_set = events(384, 1), events(150, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        score = f1_score(net, val_set, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: validation F1 {score:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
