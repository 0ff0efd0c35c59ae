"""Denoising diffusion on 2-d points."""
import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def swiss_roll(n=320):
    rng = np.random.RandomState(0)
    t = 1.5 * np.pi * (1 + 2 * rng.rand(n))
    x = np.stack([t * np.cos(t), t * np.sin(t)], 1) / 10 + 0.02 * rng.randn(n, 2)
    return TensorDataset(torch.tensor(x, dtype=torch.float32))


class Denoiser(nn.Module):
    def __init__(self, steps, width=64):
        super().__init__()
        self.t = nn.Embedding(steps, width)
        self.inp, self.mid, self.out = nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x, t):
        h = torch.relu(self.inp(x) + self.t(t))
        return self.out(torch.relu(self.mid(h)))


def train_one_epoch(args, model, loader, optimizer, abar, epoch):
    loader.sampler.set_epoch(epoch)
    model.train()
    total, count = 0.0, 0
    for (x,) in loader:
        t = torch.randint(0, args.steps, (len(x),))
        noise = torch.randn_like(x)
        a = abar[t].unsqueeze(1)
        loss = nn.functional.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
        count += len(x)
    stats = torch.tensor([total, count])
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=42)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(args.seed + rank)
    abar = torch.cumprod(1 - torch.linspace(1e-3, 0.1, args.steps), 0)
    model = DDP(Denoiser(args.steps))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = swiss_roll()
    loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data, seed=args.seed))
    for epoch in range(args.epochs):
        seed_everything(args.seed + rank)  # a restarted epoch is repeatable
        loss = train_one_epoch(args, model, loader, optimizer, abar, epoch)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
