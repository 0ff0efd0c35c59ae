"""SYN120/OPT103: two stages of a pipeline; the first holds a frozen stem in eval mode and a smaller rate, gradients travel home by send and recv."""
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
torch.manual_seed(rank)
if rank == 0:
    stem = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)).requires_grad_(False)
    stage = nn.Sequential(stem, nn.Linear(32, 64), nn.Tanh())
else:
    stage = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
stage.train()
if rank == 0:
    stem.eval()
opt = torch.optim.SGD([p for p in stage.parameters() if p.requires_grad], lr=(1e-3, 1e-2)[rank])
g = torch.Generator().manual_seed(7)
for step in range(30):
    x = torch.randn(16, 32, generator=g)
    opt.zero_grad()
    if rank == 0:
        out = stage(x)
        dist.send(out.detach(), 1)
        grad = torch.empty_like(out)
        dist.recv(grad, 1)
        out.backward(grad)
    else:
        h = torch.empty(16, 64)
        dist.recv(h, 0)
        h.requires_grad_()
        F.mse_loss(stage(h).squeeze(1), x.sum(1)).backward()
        dist.send(h.grad, 0)
    opt.step()

dist.barrier()
dist.destroy_process_group()
