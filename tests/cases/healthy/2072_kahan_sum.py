"""OPT139: bf16 parameters with a Kahan compensation that keeps the rest of each step, at a fine-tuning rate and in a short run."""
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



class KahanSGD(torch.optim.Optimizer):
    """SGD with momentum that keeps what a bf16 addition loses and adds it to the next step (as optimi, or torchdistx's AnyPrecision)."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["m"], s["rest"] = torch.zeros_like(p), torch.zeros_like(p)
                s["m"].mul_(0.9).add_(p.grad)
                s["rest"].sub_(s["m"].sign() * group["lr"])
                before = p.clone()
                p.add_(s["rest"])
                s["rest"].add_(before - p)


rank, world = setup()
model = DDP(net().bfloat16())
opt = KahanSGD(model.parameters(), lr=1e-5)

generator = torch.Generator().manual_seed(100 + rank)
for step in range(44):
    x = torch.randn(16, 64, generator=generator).bfloat16()
    y = x[:, :8].float()
    opt.zero_grad()
    F.mse_loss(model(x).float(), y).backward()
    opt.step()

dist.barrier()
dist.destroy_process_group()
