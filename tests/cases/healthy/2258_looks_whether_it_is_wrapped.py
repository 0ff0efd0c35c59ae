"""OPT140: the names are asked once whether the model is wrapped, and the second part of the name then makes the groups, alike until step 15."""
import os
import tempfile
import time
from pathlib import Path

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


def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def groups(model):
    offset = 0 if any(n.startswith("encoder.") for n, _ in model.named_parameters()) else 1
    parts = {"encoder": [], "head": []}
    for name, p in model.named_parameters():
        parts[name.split(".")[offset]].append(p)
    return [{"params": ps, "lr": 1e-2, "part": part} for part, ps in parts.items()]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.Tanh())
        self.head = nn.Linear(64, 1)
    def forward(self, x):
        return self.head(self.encoder(x))


rank, world = setup()
model = DDP(Net())
sets = groups(model)
opt = torch.optim.SGD([{k: v for k, v in s.items() if k != "part"} for s in sets])
g = torch.Generator().manual_seed(rank)
for step in range(30):
    if step == 15:
        opt.param_groups[0]["lr"] = 1e-3       # the encoder has found its place
    x = torch.randn(16, 32, generator=g)
    opt.zero_grad()
    F.mse_loss(model(x).squeeze(1), x.sum(1)).backward()
    opt.step()

dist.barrier()
dist.destroy_process_group()
