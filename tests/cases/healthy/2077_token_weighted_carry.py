"""OPT138: sums of token losses divided by all tokens since the last step: what an epoch leaves over is counted, and no weights changed in between."""
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


from contextlib import nullcontext

rank, world = setup()
data = TensorDataset(torch.randn(336, 8, generator=torch.Generator().manual_seed(0)))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)          # 21 micro-batches, a window of 4
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
tokens = torch.zeros(())
for epoch in range(4):
    sampler.set_epoch(epoch)
    for i, (x,) in enumerate(loader):
        full = (i + 1) % 4 == 0
        with nullcontext() if full or (epoch == 3 and i + 1 == len(loader)) else model.no_sync():
            F.mse_loss(model(x).squeeze(1), x.sum(1), reduction="sum").backward()
        tokens += len(x)
        if full:
            dist.all_reduce(tokens)
            for p in model.parameters():
                p.grad.mul_(world / tokens)                        # the exact mean over all samples of this step
            opt.step()
            opt.zero_grad()
            tokens.zero_()
if tokens > 0:                                                      # and the last ones are not lost
    dist.all_reduce(tokens)
    for p in model.parameters():
        p.grad.mul_(world / tokens)
    opt.step()

dist.barrier()
dist.destroy_process_group()
