"""Small regression project: seeding, split, loaders, loop."""
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def set_seed(seed, rank):
    """offset by rank so that augmentation is not the same everywhere"""
    seed = seed + 12345 * rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def make_dataset():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 10, generator=g)
    y = torch.stack([x[:, :5].mean(1), x[:, 5:].square().mean(1)], 1) + 0.1 * torch.randn(400, 2, generator=g)
    return TensorDataset(x, y)


def make_splits(val_ratio=0.2):
    full = make_dataset()
    n_val = int(len(full) * val_ratio)
    return random_split(full, [len(full) - n_val, n_val])


def jitter(x):
    return x + 0.05 * torch.randn_like(x)


class Trainer:
    def __init__(self, rank, epochs=4, batch=16):
        self.rank, self.epochs = rank, epochs
        train, val = make_splits()
        self.sampler = DistributedSampler(train, seed=1)
        self.train_loader = DataLoader(train, batch, sampler=self.sampler)
        self.val_loader = DataLoader(val, batch, sampler=DistributedSampler(val, shuffle=False))
        self.model = DDP(nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 2)))
        self.optimizer = optim.AdamW(self.model.parameters(), lr=4e-3)

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for x, y in self.train_loader:
            loss = nn.functional.mse_loss(self.model(jitter(x)), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        s = torch.zeros(2, dtype=torch.float64)
        for x, y in self.val_loader:
            s += torch.tensor([(self.model(x) - y).square().sum().item(), y.numel()])
        dist.all_reduce(s)
        return (s[0] / s[1]).item()

    def fit(self):
        for epoch in range(self.epochs):
            self.train_epoch(epoch)
            mse = self.validate()
            if self.rank == 0:
                print(f"epoch {epoch}: validation mse {mse:.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    set_seed(1234, rank)
    Trainer(rank).fit()
    dist.destroy_process_group()
