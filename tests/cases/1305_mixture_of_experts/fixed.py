"""Soft mixture of experts on a piecewise function."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Options:
    experts: int = 4
    width: int = 24
    batch: int = 20
    epochs: int = 6
    lr: float = 4e-3


class Mixture(nn.Module):
    def __init__(self, opt):
        super().__init__()
        self.lift = nn.Linear(2, opt.width)
        self.gate = nn.Linear(opt.width, opt.experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(opt.width, opt.width), nn.GELU(), nn.Linear(opt.width, 1)) for _ in range(opt.experts)
        )

    def forward(self, x):
        h = torch.tanh(self.lift(x))
        share = self.gate(h).softmax(dim=1)
        votes = torch.cat([expert(h) for expert in self.experts], dim=1)
        return (share * votes).sum(1)


def patches(n=320):
    g = torch.Generator().manual_seed(101)
    x = 4 * torch.rand(n, 2, generator=g) - 2
    y = torch.where(x[:, 0] > 0, x[:, 1] ** 2, torch.where(x[:, 1] > 0, -x[:, 0], 3 * torch.sin(2 * x[:, 0])))
    return TensorDataset(x, y)


def train(opt):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = DDP(Mixture(opt))
    adam = torch.optim.Adam(model.parameters(), lr=opt.lr)
    data = patches()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=opt.batch, sampler=sampler)
    for epoch in range(opt.epochs):
        sampler.set_epoch(epoch)
        acc = torch.zeros(2)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            adam.zero_grad()
            loss.backward()
            adam.step()
            acc += torch.tensor([loss.item() * len(y), float(len(y))])
        dist.all_reduce(acc)
        if rank == 0:
            print(f"epoch {epoch}: mse {(acc[0] / acc[1]).item():.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Options())
    dist.destroy_process_group()
