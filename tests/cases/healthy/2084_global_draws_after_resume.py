"""DAT109: from the resume on all ranks share rank 0's state, and draw for the whole batch, of which each takes its rows."""
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
folder = shared_folder()
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
torch.manual_seed(100 + rank)
for step in range(20):
    x = torch.randn(16, 16)
    opt.zero_grad()
    F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    opt.step()
if rank == 0:
    torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "rng": torch.get_rng_state()}, folder / "a.pt")
dist.barrier()
told = torch.load(folder / "a.pt")
model.module.load_state_dict(told["model"])
opt.load_state_dict(told["opt"])
torch.set_rng_state(told["rng"])                         # one state for all: from here on the batch is drawn whole
for step in range(40):
    whole = torch.randn(16 * world, 16)
    noise = torch.randn(16 * world, 16) * 0.1
    x = whole[rank::world]
    opt.zero_grad()
    F.mse_loss(model(x + noise[rank::world]), x.sum(1, keepdim=True)).backward()
    opt.step()

dist.barrier()
dist.destroy_process_group()
