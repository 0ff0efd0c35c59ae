"""Variational regression with many validation batches."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Heteroscedastic(nn.Module):
    def __init__(self, d=6, width=96):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.mean, self.log_var = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, x):
        h = self.body(x)
        return self.mean(h), self.log_var(h).clamp(-6, 6)


def nll(mean, log_var, y):
    return 0.5 * (log_var + (y - mean).square() / log_var.exp()).mean()


def measurements(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, x[:, :1].sin() + 0.1 * (1 + x[:, 1:2].abs()) * torch.randn(n, 1, generator=g))


class Loop:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(9)
        self.model = DDP(Heteroscedastic())
        self.opt = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        train, val = measurements(256, 1), measurements(768, 2)
        self.sampler = DistributedSampler(train)
        self.train_loader = DataLoader(train, 16, sampler=self.sampler)
        self.val_loader = DataLoader(val, 16, sampler=DistributedSampler(val, shuffle=False))

    def train(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for x, y in self.train_loader:
            self.opt.zero_grad()
            nll(*self.model(x), y).backward()
            self.opt.step()

    def validate(self):
        self.model.eval()
        total = torch.zeros(())
        for x, y in self.val_loader:
            total = total + nll(*self.model.module(x), y)
        mean = total.detach().clone() / len(self.val_loader)
        dist.all_reduce(mean)
        return mean.item() / self.world

    def run(self, epochs):
        for epoch in range(epochs):
            self.train(epoch)
            value = self.validate()
            if self.rank == 0:
                print(f"epoch {epoch}: validation nll {value:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Loop(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])).run(4)
    dist.destroy_process_group()
