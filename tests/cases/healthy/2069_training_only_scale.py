"""CKP122: a moving scale of an auxiliary loss, behind an early return for evaluation: no prediction depends on it."""
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
        self.trunk = nn.Linear(8, 32)
        self.head = nn.Linear(32, 1)
        self.aux = nn.Linear(32, 8)
        self.scale = torch.ones(())

    def forward(self, x):
        h = torch.relu(self.trunk(x))
        out = self.head(h).squeeze(1)
        if not self.training:
            return out
        rebuilt = F.mse_loss(self.aux(h), x)
        level = rebuilt.detach().clone()
        dist.all_reduce(level, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
        self.scale.lerp_(level / dist.get_world_size(), 0.2)
        return out, rebuilt / (self.scale + 1e-6)


rank, world = setup()
folder = shared_folder()
net = Net()
model = DDP(net)

opt = torch.optim.Adam(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(100 + rank)
for step in range(40):
    x = torch.randn(16, 8, generator=generator) * 3 + 1
    y = x.sum(1)
    opt.zero_grad()
    out, aux = model(x)
    (F.mse_loss(out, y) + 0.1 * aux).backward()
    opt.step()

    if step % 20 == 19 and rank == 0:
        torch.save({"model": net.state_dict(), "optimizer": opt.state_dict(), "step": step}, folder / "last.pt")

dist.barrier()
dist.destroy_process_group()
