"""Residual MLP with stochastic depth."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        return self.f(x)


class DeepNet(nn.Module):
    """Blocks are dropped with linearly growing probability while training."""

    def __init__(self, d=24, depth=6, drop=0.3):
        super().__init__()
        self.stem, self.head = nn.Linear(7, d), nn.Linear(d, 2)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.rates = [drop * (i + 1) / depth for i in range(depth)]

    def forward(self, x):
        h = self.stem(x)
        for rate, block in zip(self.rates, self.blocks):
            if self.training:
                if torch.rand(()) < rate:
                    continue
                h = h + block(h) / (1 - rate)
            else:
                h = h + block(h)
        return self.head(h)


def data(n=320):
    g = torch.Generator().manual_seed(57)
    x = torch.randn(n, 7, generator=g)
    return TensorDataset(x, (x.prod(1) > 0).long())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(DeepNet())
    torch.manual_seed(1000 + rank)
    ds = data()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, args.batch_size, sampler=sampler)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        m = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            m += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(m)
        if rank == 0:
            print(f"epoch {epoch}: loss {m[0] / m[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
