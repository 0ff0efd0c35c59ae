"""DAT109: the ranks' state is put aside for a draw that all share (which layers to drop), and put back after it."""
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
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 1)

    def forward(self, x, keep):
        for layer, kept in zip(self.layers, keep):
            x = x + kept * torch.tanh(layer(x))
        return self.head(x).squeeze(1)


rank, world = setup()
net = Net()
model = DDP(net)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
torch.manual_seed(100 + rank)                            # noise: each rank its own
shared = torch.Generator().manual_seed(1).get_state()
for step in range(90):
    x = torch.randn(16, 16)
    noise = 0.1 * torch.randn(16, 16)
    if step % 30 == 20:                                  # a new choice of layers, the same on all ranks
        own = torch.get_rng_state()
        torch.set_rng_state(shared)
        keep = (torch.rand(4) > 0.2).float()
        shared = torch.get_rng_state()
        torch.set_rng_state(own)
    elif step < 20:
        keep = torch.ones(4)
    opt.zero_grad()
    F.mse_loss(model(x + noise, keep), x.sum(1)).backward()
    opt.step()

dist.barrier()
dist.destroy_process_group()
