"""DAT112: a warm-up of a fixed number of steps is a stage of its own; the second stage starts from its file, with its own first epoch."""
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
data = TensorDataset(torch.randn(640, 8, generator=torch.Generator().manual_seed(0)))
sampler = DistributedSampler(data, shuffle=True, seed=3)
loader = DataLoader(data, batch_size=8, sampler=sampler)


def build():
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def train(model, opt, epochs, max_steps=None):
    done = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            opt.zero_grad()
            F.mse_loss(model(x).squeeze(1), x.sum(1)).backward()
            opt.step()
            done += 1
            if done == max_steps:
                return


model, opt = build()
for group in opt.param_groups:
    group["lr"] = 1e-4
train(model, opt, 1, max_steps=20)                      # stage 1: 20 steps at a low rate
if rank == 0:
    torch.save({"model": model.module.state_dict(), "opt": opt.state_dict()}, folder / "warm.pt")
dist.barrier()
model, opt = build()                                    # stage 2: whole epochs, from the warm weights and moments
told = torch.load(folder / "warm.pt")
model.module.load_state_dict(told["model"])
opt.load_state_dict(told["opt"])
for group in opt.param_groups:
    group["lr"] = 1e-3
train(model, opt, 3)

dist.barrier()
dist.destroy_process_group()
