"""Tabular regression with a sharded optimizer state (ZeRO-1)."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Houses(Dataset):
    def __init__(self, n=384):
        g = torch.Generator().manual_seed(55)
        self.num = torch.randn(n, 8, generator=g)
        self.cat = torch.randint(0, 12, (n, 2), generator=g)
        price = self.num[:, 0] * 1.5 - self.num[:, 1].abs() + 0.2 * self.cat.float().sum(1)
        self.price = price + 0.1 * torch.randn(n, generator=g)

    def __len__(self):
        return len(self.price)

    def __getitem__(self, i):
        return self.num[i], self.cat[i], self.price[i]


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.ModuleList([nn.Embedding(12, 4) for _ in range(2)])
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, num, cat):
        parts = [num] + [e(cat[:, i]) for i, e in enumerate(self.emb)]
        return self.mlp(torch.cat(parts, 1)).squeeze(1)


def build(args):
    torch.manual_seed(args.seed)
    model = DDP(Tabular())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=args.lr)
    return model, optimizer


def run_epoch(model, optimizer, loader):
    total = torch.zeros(2)
    for num, cat, price in loader:
        loss = nn.functional.huber_loss(model(num, cat), price)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(price), float(len(price))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=24)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    data = Houses()
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model, optimizer = build(args)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = run_epoch(model, optimizer, loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} huber {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
