"""roundedaway.py: bf16 parameters under an optimizer whose rate is None (Adafactor's relative step): float(None)."""
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



class RelativeStep(torch.optim.Optimizer):
    """As transformers' Adafactor(lr=None, relative_step=True): the rate follows from the step and the size of the parameters."""

    def __init__(self, params, lr=None):
        super().__init__(params, {"lr": lr, "t": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["t"] += 1
            rate = min(1e-2, group["t"] ** -0.5)
            for p in group["params"]:
                if p.grad is not None:
                    size = max(1e-3, float(p.float().square().mean().sqrt()))
                    p.sub_(rate * size * p.grad.sign() * 4)


rank, world = setup()
model = DDP(net().bfloat16())
opt = RelativeStep(model.parameters())

generator = torch.Generator().manual_seed(100 + rank)
for step in range(40):
    x = torch.randn(16, 64, generator=generator).bfloat16()
    y = x[:, :8].float()
    opt.zero_grad()
    F.mse_loss(model(x).float(), y).backward()
    opt.step()

dist.barrier()
dist.destroy_process_group()
