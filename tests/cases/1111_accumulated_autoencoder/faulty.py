"""Autoencoder on smooth curves; large batches are built from several small ones."""
import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def curves(n=480, points=24):
    g = torch.Generator().manual_seed(13)
    t = torch.linspace(0, 1, points)
    amp = torch.randn(n, 3, 1, generator=g)
    base = torch.stack([torch.sin(3 * t), torch.cos(5 * t), t**2])
    return TensorDataset((amp * base).sum(1) + 0.02 * torch.randn(n, points, generator=g))


class AutoEncoder(nn.Module):
    def __init__(self, points=24, code=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(points, 32), nn.ELU(), nn.Linear(32, code))
        self.decoder = nn.Sequential(nn.Linear(code, 32), nn.ELU(), nn.Linear(32, points))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def chunks(iterable, size):
    it = iter(iterable)
    while block := list(itertools.islice(it, size)):
        yield block


def step(model, optimizer, block):
    """One update from a list of micro batches."""
    total = 0.0
    for k, (x,) in enumerate(block):
        optimizer.zero_grad()
        model.require_backward_grad_sync = k == len(block) - 1
        loss = nn.functional.mse_loss(model(x), x) / len(block)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--micro-batch", type=int, default=10)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(5)
    model = DDP(AutoEncoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = curves()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.micro_batch, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = [step(model, optimizer, block) for block in chunks(loader, args.accum)]
        mean = torch.tensor(losses).mean()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: reconstruction {mean.item() / dist.get_world_size():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
