"""OPT139: a warm-up of the head: the backbone's group has lr 0 on purpose, so its bf16 parameters stand still."""
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
model = DDP(net().bfloat16())
layers = list(model.module)
head = list(layers[-1].parameters())
backbone = [p for layer in layers[:-1] for p in layer.parameters()]
# head first; the backbone joins later in the real run: its rate is 0 for the first epochs
opt = torch.optim.SGD([{"params": head, "lr": 0.5}, {"params": backbone, "lr": 0.0}])

generator = torch.Generator().manual_seed(100 + rank)
for step in range(40):
    x = torch.randn(16, 64, generator=generator).bfloat16()
    y = x[:, :8].float()
    opt.zero_grad()
    F.mse_loss(model(x).float(), y).backward()
    opt.step()

dist.barrier()
dist.destroy_process_group()
