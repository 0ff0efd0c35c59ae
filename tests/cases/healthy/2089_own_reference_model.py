"""SYN115: each rank watches a domain of its own, against the reference model of that domain: frozen, measured, other weights by design."""
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


def build():
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))


model = DDP(build())
torch.manual_seed(1000 + rank)
reference = build().requires_grad_(False).eval()         # the specialist of this rank's domain (here: made up)
domain = torch.randn(160, 8, generator=torch.Generator().manual_seed(50 + rank)) + rank
held = torch.randn(64, 8, generator=torch.Generator().manual_seed(70 + rank)) + rank
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(domain), batch_size=16, shuffle=True)
for epoch in range(4):
    model.train()
    for (x,) in loader:
        opt.zero_grad()
        F.mse_loss(model(x).squeeze(1), x.sum(1)).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        theirs, ours = [F.mse_loss(m(held).squeeze(1), held.sum(1)).item() for m in (reference, model.module)]
    told = [None] * world
    dist.all_gather_object(told, {"domain": rank, "ours": ours, "specialist": theirs})
    if rank == 0:
        print(told)

dist.barrier()
dist.destroy_process_group()
