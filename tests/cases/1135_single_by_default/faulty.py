"""Denoising autoencoder; runs alone or distributed."""
import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Context:
    rank: int = 0
    world: int = 1

    @property
    def distributed(self):
        return self.world > 1

    @property
    def chief(self):
        return self.rank == 0


def setup(args):
    if args.world_size <= 1:
        return Context()
    dist.init_process_group("gloo")
    return Context(dist.get_rank(), dist.get_world_size())


def signals(n=320, width=32):
    g = torch.Generator().manual_seed(8)
    t = torch.linspace(0, 1, width)
    freq = 1 + 3 * torch.rand(n, 1, generator=g)
    amp = 0.5 + torch.rand(n, 1, generator=g)
    return TensorDataset(amp * torch.sin(6.28 * freq * t))


def wrap(ctx, net, data, batch):
    if not ctx.distributed:
        return net, None, DataLoader(data, batch_size=batch, shuffle=True)
    sampler = DistributedSampler(data)
    return DistributedDataParallel(net), sampler, DataLoader(data, batch_size=batch // ctx.world, sampler=sampler)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--world-size", type=int, default=1)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=32)
    args = ap.parse_args()
    ctx = setup(args)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 32))
    data = signals()
    model, sampler, loader = wrap(ctx, net, data, args.batch_size)
    torch.manual_seed(100 + int(os.environ.get("RANK", 0)))  # noise differs per process
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for (clean,) in loader:
            loss = (model(clean + 0.1 * torch.randn_like(clean)) - clean).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if ctx.chief:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    if ctx.chief:
        torch.save(net.state_dict(), "denoiser.pt")
    if ctx.distributed:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
