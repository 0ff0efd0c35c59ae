"""OPT139: the optimizer keeps float32 master weights of its own and writes them into the bf16 parameters: nothing is lost."""
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



class MasterAdamW(torch.optim.Optimizer):
    """bf16 parameters outside, float32 masters and moments inside (as DeepSpeed's BF16_Optimizer)."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.masters = [[p.detach().float().clone() for p in g["params"]] for g in self.param_groups]
        self.inner = torch.optim.AdamW([m for g in self.masters for m in g], lr=lr)

    @torch.no_grad()
    def step(self, closure=None):
        for group, masters in zip(self.param_groups, self.masters):
            for p, m in zip(group["params"], masters):
                m.grad = p.grad.float() if p.grad is not None else None
        self.inner.step()
        for group, masters in zip(self.param_groups, self.masters):
            for p, m in zip(group["params"], masters):
                p.copy_(m)


rank, world = setup()
model = DDP(net().bfloat16())
opt = MasterAdamW(model.parameters(), lr=1e-5)

generator = torch.Generator().manual_seed(100 + rank)
for step in range(44):
    x = torch.randn(16, 64, generator=generator).bfloat16()
    y = x[:, :8].float()
    opt.zero_grad()
    F.mse_loss(model(x).float(), y).backward()
    opt.step()

dist.barrier()
dist.destroy_process_group()
