"""DAT112: the interrupted epoch is gone on with: what it has seen is drawn from the iterator and dropped."""
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


def run(stop_at=None):
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    epoch = seen = 0
    if (folder / "last.pt").exists():
        told = torch.load(folder / "last.pt")
        model.module.load_state_dict(told["model"])
        opt.load_state_dict(told["opt"])
        epoch, seen = told["epoch"], told["seen"]
    while epoch < 3:
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(seen):
            next(batches)
        for (x,) in batches:
            opt.zero_grad()
            F.mse_loss(model(x).squeeze(1), x.sum(1)).backward()
            opt.step()
            seen += 1
            if epoch == 1 and seen == stop_at:          # the time of the job is over
                if rank == 0:
                    torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch, "seen": seen}, folder / "last.pt")
                dist.barrier()
                return
        epoch, seen = epoch + 1, 0


run(stop_at=17)
run()

dist.barrier()
dist.destroy_process_group()
