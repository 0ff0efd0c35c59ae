"""Sensor regression in fp16 autocast with a loss scaler and own gradient averaging."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def sensors(n=640, dim=24):
    g = torch.Generator().manual_seed(55)
    gain = torch.exp(0.8 * torch.randn(n, 1, generator=g))
    x = gain * torch.randn(n, dim, generator=g)
    w = torch.randn(dim, 2, generator=g) / dim ** 0.5
    return TensorDataset(x, torch.tanh(x @ w))


class Net(nn.Module):
    def __init__(self, dim=24, width=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
                                    nn.Linear(width, 2))

    def forward(self, x):
        return self.layers(x)


def average(params, world):
    """One flat all-reduce for everything."""
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for p in params:
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--growth-interval", type=int, default=4)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(11)
    net = Net()
    params = list(net.parameters())
    for p in params:
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.AdamW(params, lr=args.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14, growth_interval=args.growth_interval)

    data = sensors()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(1)
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(x)
            loss = nn.functional.mse_loss(out.float(), y)
            scaler.scale(loss).backward()
            average(params, world)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, args.clip)
            scaler.step(optimizer)
            scaler.update()
            running += loss.detach()
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch}: mse {running.item() / world / len(loader):.4f} scale {scaler.get_scale():.0f}",
                  flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
