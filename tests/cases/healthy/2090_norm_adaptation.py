"""EVL118: the weights are frozen, and train() lets the BatchNorm statistics follow the new domain on purpose (AdaBN)."""
import json
import os
import pickle
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
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


class Net(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.backbone(x)).squeeze(1)


def pretrained():
    """As libraries hand a model out: loaded, and in eval mode."""
    backbone = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU())
    backbone.eval()
    return backbone


rank, world = setup()
net = Net(pretrained())
net.backbone.requires_grad_(False)
model = DDP(net)
opt = torch.optim.Adam(net.head.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(100 + rank)
before = net.backbone[1].running_mean.clone()
for epoch in range(3):
    model.train()                                        # AdaBN: statistics of the target domain, frozen weights
    for _ in range(12):
        x = torch.randn(16, 8, generator=generator) * 2 + 3
        opt.zero_grad()
        F.mse_loss(model(x), x.sum(1)).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        x = torch.randn(16, 8, generator=generator) * 2 + 3
        model(x)
assert not torch.equal(before, net.backbone[1].running_mean)

dist.barrier()
dist.destroy_process_group()
