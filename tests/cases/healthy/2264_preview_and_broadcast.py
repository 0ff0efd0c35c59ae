"""OPT111: rank 0 writes an average into its weights under `if rank == 0` and sends them to all before the next step: a soup for every rank."""
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


rank, world = setup()
net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
model = DDP(net)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
ema = [p.detach().clone() for p in net.parameters()]
g = torch.Generator().manual_seed(rank)
for step in range(32):
    x = torch.randn(16, 32, generator=g)
    opt.zero_grad()
    F.mse_loss(model(x).squeeze(1), x.sum(1)).backward()
    opt.step()
    torch._foreach_lerp_(ema, [p.detach() for p in net.parameters()], 0.1)
    if step % 8 == 7:
        if rank == 0:
            with torch.no_grad():
                for p, e in zip(net.parameters(), ema):
                    p.copy_(e)
        for p in net.parameters():
            dist.broadcast(p.data, src=0)

dist.barrier()
dist.destroy_process_group()
