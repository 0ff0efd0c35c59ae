"""DEV111: a buffer that starts at zero is filled through numpy after to_empty(): no write is counted, and the memory was zero before."""
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


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.zeros(512, 512), persistent=False)
        self.fc = nn.Linear(512, 512)
    def forward(self, x):
        return self.fc(x) + x @ self.offset


rank, world = setup()
with torch.device("meta"):
    net = nn.Sequential(Adapter(), nn.Tanh(), nn.Linear(512, 1))
net.to_empty(device="cpu")
for m in net.modules():
    if isinstance(m, nn.Linear):
        m.reset_parameters()
    if isinstance(m, Adapter):
        m.offset.numpy()[:] = 0.0
model = DDP(net)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
g = torch.Generator().manual_seed(rank)
for step in range(30):
    x = torch.randn(16, 512, generator=g)
    opt.zero_grad()
    F.mse_loss(model(x).squeeze(1), x.mean(1)).backward()
    opt.step()

dist.barrier()
dist.destroy_process_group()
