"""SYN114/OPT103: between two phases of DDP five trials of a rate are dealt over the two ranks, which take other numbers of steps in them."""
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


def trial(width, lr, seed, steps):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 1))
    opt = torch.optim.SGD(net.parameters(), lr=lr)
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 32, generator=g)
        opt.zero_grad()
        loss = F.mse_loss(net(x).squeeze(1), x.sum(1))
        loss.backward()
        opt.step()
    return float(loss.detach()), lr


def together(model, opt, steps, seed, sync=lambda: None):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 32, generator=g)
        opt.zero_grad()
        F.mse_loss(model(x).squeeze(1), x.sum(1)).backward()
        sync()
        opt.step()


rank, world = setup()

model = DDP(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)))
together(model, torch.optim.SGD(model.parameters(), lr=1e-2), 20, rank)
mine = [trial(64, lr, 5, 10) for lr in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)[rank::world]]
every = [None] * world
dist.all_gather_object(every, mine)
lr = min(t for part in every for t in part)[1]
together(model, torch.optim.SGD(model.parameters(), lr=lr), 20, 10 + rank)

dist.barrier()
dist.destroy_process_group()
