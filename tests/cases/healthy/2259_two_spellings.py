"""OPT140: a set of frozen names has each name in both spellings, with and without the wrapper; nothing is to be frozen in this run's stage."""
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset


def setup(seed=0):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return dist.get_rank(), dist.get_world_size()


def shared_folder():
    box = [tempfile.mkdtemp(prefix="run") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return Path(box[0])


def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


FROZEN_BY_STAGE = {0: ["encoder."], 1: []}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.Tanh())
        self.head = nn.Linear(64, 1)
    def forward(self, x):
        return self.head(self.encoder(x))


def bare(name):
    return name.split(".", 1)[1]


def freeze(model, stage):
    for name, p in model.named_parameters():
        key = name if name.startswith(("encoder.", "head.")) else bare(name)
        p.requires_grad_(not any(key.startswith(lead) for lead in FROZEN_BY_STAGE[stage]))


rank, world = setup()
model = DDP(Net())
freeze(model, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
g = torch.Generator().manual_seed(rank)
for step in range(30):
    x = torch.randn(16, 32, generator=g)
    opt.zero_grad()
    F.mse_loss(model(x).squeeze(1), x.sum(1)).backward()
    opt.step()

dist.barrier()
dist.destroy_process_group()
