"""PRF115: rank 0 draws a new mask of the smallest weights after each step and sends the masked weights: without it the ranks part."""
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


rank, world = setup()
model = DDP(nn.Sequential(*[layer for _ in range(10) for layer in (nn.Linear(32, 32), nn.Tanh())], nn.Linear(32, 1)))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(100 + rank)
masks = torch.Generator().manual_seed(5)
for step in range(60):
    x = torch.randn(16, 32, generator=generator)
    opt.zero_grad()
    F.mse_loss(model(x).squeeze(1), x.sum(1)).backward()
    opt.step()
    with torch.no_grad():
        for p in model.parameters():
            if rank == 0 and p.dim() == 2:
                p.mul_(torch.rand(p.shape, generator=masks) > 0.02)
            dist.broadcast(p.data, src=0)

dist.barrier()
dist.destroy_process_group()
