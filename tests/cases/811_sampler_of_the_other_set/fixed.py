"""Gesture classification from short traces."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


def traces(n=384, length=16):
    g = torch.Generator().manual_seed(33)
    y = torch.randint(0, 3, (n,), generator=g)
    t = torch.linspace(0, 3.1416, length)
    shape = torch.stack([t.sin(), t.cos(), (2 * t).sin()])
    return TensorDataset(shape[y] + 0.6 * torch.randn(n, length, generator=g), y)


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    hits = torch.zeros(2)
    for x, y in loader:
        hits += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
    net.train()
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)

    train_set, val_set = random_split(traces(), [320, 64], generator=torch.Generator().manual_seed(1))
    train_sampler = DistributedSampler(train_set, shuffle=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=args.batch_size, sampler=val_sampler)

    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = accuracy(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: validation accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
