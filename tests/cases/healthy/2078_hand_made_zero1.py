"""PRF115: a hand-made ZeRO-1: each rank steps its share of DDP's parameters and sends them to the others. The broadcast is the step."""
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
model = DDP(nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())], nn.Linear(32, 1)))
params = list(model.parameters())
mine = [p for i, p in enumerate(params) if i % world == rank]
opt = torch.optim.Adam(mine, lr=1e-3)                # moments of a half of the parameters only
generator = torch.Generator().manual_seed(100 + rank)
for step in range(60):
    x = torch.randn(16, 32, generator=generator)
    model.zero_grad()
    F.mse_loss(model(x).squeeze(1), x.sum(1)).backward()
    opt.step()
    for i, p in enumerate(params):
        dist.broadcast(p.data, src=i % world)

dist.barrier()
dist.destroy_process_group()
