"""OPT139: a WGAN critic in bf16 whose weights are clipped: most stand at the bound, as they do in float32."""
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


def net():
    return nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))



rank, world = setup()
critic = net().bfloat16()
for p in critic.parameters():
    p.data.clamp_(-0.03, 0.03)
model = DDP(critic)
opt = torch.optim.RMSprop(model.parameters(), lr=5e-3)
generator = torch.Generator().manual_seed(100 + rank)
for step in range(40):
    real = torch.randn(16, 64, generator=generator).bfloat16() + 1
    fake = torch.randn(16, 64, generator=generator).bfloat16()
    opt.zero_grad()
    scores = model(torch.cat([real, fake])).float()
    (scores[16:].mean() - scores[:16].mean()).backward()
    opt.step()
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.03, 0.03)

dist.barrier()
dist.destroy_process_group()
