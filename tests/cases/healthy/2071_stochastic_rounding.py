"""OPT139: bf16 parameters with stochastic rounding: most elements stay in one step, and the mean step is exact."""
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



class StochasticAdam(torch.optim.Optimizer):
    """AdamW whose result is rounded up or down with the probability of what would be lost (as torchao's bf16_stochastic_round)."""

    def __init__(self, params, lr=1e-5):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["m"], s["v"], s["t"] = torch.zeros_like(p, dtype=torch.float32), torch.zeros_like(p, dtype=torch.float32), 0
                g = p.grad.float()
                s["t"] += 1
                s["m"].lerp_(g, 0.1)
                s["v"].lerp_(g * g, 0.001)
                update = (s["m"] / (1 - 0.9 ** s["t"])) / ((s["v"] / (1 - 0.999 ** s["t"])).sqrt() + 1e-8)
                exact = p.float() - group["lr"] * update
                bits = exact.view(torch.int32)
                noise = torch.randint_like(bits, 0, 1 << 16, generator=self.generator) if False else torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, generator=self.generator)
                p.copy_(((bits + noise) & -65536).view(torch.float32).bfloat16())


rank, world = setup()
model = DDP(net().bfloat16())
opt = StochasticAdam(model.parameters(), lr=1e-5)
opt.generator = torch.Generator().manual_seed(7)      # the same on every rank: equal replicas

generator = torch.Generator().manual_seed(100 + rank)
for step in range(44):
    x = torch.randn(16, 64, generator=generator).bfloat16()
    y = x[:, :8].float()
    opt.zero_grad()
    F.mse_loss(model(x).float(), y).backward()
    opt.step()

dist.barrier()
dist.destroy_process_group()
