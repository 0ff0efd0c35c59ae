"""Residual network with stochastic depth."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Residual(nn.Module):
    def __init__(self, width, keep):
        super().__init__()
        self.keep = keep
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, h):
        if not self.training:
            return h + self.keep * self.body(h)
        if torch.rand(()).item() > self.keep:
            return h
        return h + self.body(h)


class StochasticDepth(nn.Module):
    def __init__(self, width=48, depth=4, last_keep=0.6):
        super().__init__()
        keeps = torch.linspace(1.0, last_keep, depth).tolist()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Residual(width, k) for k in keeps)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def friedman(n=256):
    g = torch.Generator().manual_seed(41)
    x = torch.rand(n, 8, generator=g)
    y = torch.sin(3.14 * x[:, 0] * x[:, 1]) + 2 * (x[:, 2] - 0.5) ** 2 + x[:, 3] + 0.5 * x[:, 4]
    return TensorDataset(x, y.unsqueeze(1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--seed", type=int, default=6)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)

    model = DistributedDataParallel(StochasticDepth(), find_unused_parameters=True)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = friedman()
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {total.item() / dist.get_world_size() / len(loader):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
