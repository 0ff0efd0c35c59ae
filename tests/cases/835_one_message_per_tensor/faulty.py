"""Deep and narrow network; gradients averaged after backward."""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def bumps(n=256):
    g = torch.Generator().manual_seed(86)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, torch.exp(-x.pow(2).sum(1, keepdim=True) / 6))


class Deep(nn.Module):
    def __init__(self, width=16, depth=32):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        h = self.first(x)
        for norm, layer in zip(self.norms, self.layers):
            h = h + 0.2 * torch.relu(layer(norm(h)))
        return self.last(h)


def average_gradients(params, world):
    for p in params:
        dist.all_reduce(p.grad)
        p.grad /= world


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=8)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = Deep()
    params = list(net.parameters())
    for p in params:
        dist.broadcast(p.data, src=0)
    opt = torch.optim.Adam(params, lr=1e-3)
    data = bumps()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        t0 = time.perf_counter()
        for x, y in loader:
            loss = nn.functional.mse_loss(net(x), y)
            opt.zero_grad()
            loss.backward()
            average_gradients(params, world)
            opt.step()
        if rank == 0:
            ms = 1000 * (time.perf_counter() - t0) / len(loader)
            print(f"epoch {epoch}: {ms:.1f} ms/step, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
