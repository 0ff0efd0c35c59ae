"""OPT109: unscale_() before the average, of a scaler that is off: bfloat16 needs none, and it looks for nothing."""
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
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=False)
g = torch.Generator().manual_seed(rank)
for step in range(30):
    x = torch.randn(16, 32, generator=g)
    opt.zero_grad()
    loss = F.mse_loss(net(x).squeeze(1), x.sum(1))
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    average(net)
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    scaler.step(opt)
    scaler.update()

dist.barrier()
dist.destroy_process_group()
