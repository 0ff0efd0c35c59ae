"""LAU112: every rank draws the global batch (rank 0 of 1, by design) and takes its rows. The legacy argument is ignored."""
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


import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0, help="ignored, kept for old launch scripts")
args = parser.parse_args()
rank, world = setup()
x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.sum(1))
sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)      # the whole order: the batch is cut below
loader = DataLoader(data, batch_size=16 * world, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        a, b = a.chunk(world)[rank], b.chunk(world)[rank]
        opt.zero_grad()
        F.mse_loss(model(a).squeeze(1), b).backward()
        opt.step()

dist.barrier()
dist.destroy_process_group()
