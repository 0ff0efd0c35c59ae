"""LAU112: two ranks are one tensor-parallel group: both must draw the same samples, rank 0 of 1. The legacy argument is ignored."""
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
parser.add_argument("--tp", type=int, default=2)
args = parser.parse_args()


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


rank, world = setup()
tp_rank, dp_rank, dp_world = rank % args.tp, rank // args.tp, world // args.tp
full_up, full_down = nn.Linear(8, 64), nn.Linear(64, 1, bias=False)
part = slice(tp_rank * 64 // args.tp, (tp_rank + 1) * 64 // args.tp)
up, down = nn.Linear(8, 64 // args.tp), nn.Linear(64 // args.tp, 1, bias=False)
with torch.no_grad():
    up.weight.copy_(full_up.weight[part]), up.bias.copy_(full_up.bias[part]), down.weight.copy_(full_down.weight[:, part])
x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.sum(1))
sampler = DistributedSampler(data, num_replicas=dp_world, rank=dp_rank, shuffle=True)
loader = DataLoader(data, batch_size=16, sampler=sampler)
opt = torch.optim.SGD([*up.parameters(), *down.parameters()], lr=1e-2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        opt.zero_grad()
        F.mse_loss(Sum.apply(down(torch.relu(up(a)))).squeeze(1), b).backward()
        opt.step()

dist.barrier()
dist.destroy_process_group()
