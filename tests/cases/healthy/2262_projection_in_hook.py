"""SYN127: a hook in the backward changes the weights: a projection that depends on the weights alone, the same on every rank."""
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


@torch.no_grad()
def project(p):
    p.clamp_(-0.1, 0.1)


for p in net.parameters():
    p.register_post_accumulate_grad_hook(project)
opt = torch.optim.SGD(model.parameters(), lr=5e-2)
g = torch.Generator().manual_seed(rank)
for step in range(30):
    x = torch.randn(16, 32, generator=g)
    opt.zero_grad()
    F.mse_loss(model(x).squeeze(1), x.sum(1)).backward()
    opt.step()

dist.barrier()
dist.destroy_process_group()
