"""PRF111: every fifth step a preview of the same first validation batch, next(iter(loader)) on purpose; keeping the iterator would move on."""
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


class Slow(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(32, generator=g)
        return x, x.sum()


rank, world = setup()
model = DDP(nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)))
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
val = DataLoader(Slow(), batch_size=8, num_workers=1)
g = torch.Generator().manual_seed(rank)
for step in range(75):
    x = torch.randn(256, 32, generator=g)
    opt.zero_grad()
    F.mse_loss(model(x).squeeze(1), x.sum(1)).backward()
    opt.step()
    if step % 5 == 0:
        vx, vy = next(iter(val))
        with torch.no_grad():
            score = F.mse_loss(model.module(vx).squeeze(1), vy)
        if rank == 0:
            print(step, float(score))

dist.barrier()
dist.destroy_process_group()
