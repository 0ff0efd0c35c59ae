"""DEV111: a memory bank of negatives holds nothing at first: `bank[:filled]` reads no row of the memory before enqueue() has written some."""
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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
        self.register_buffer("bank", torch.empty(256, 16), persistent=False)
        self.filled = 0
    def forward(self, a, b):
        q, k = F.normalize(self.fc(a), dim=1), F.normalize(self.fc(b), dim=1)
        keys = torch.cat([k, self.bank[: self.filled]])
        return F.cross_entropy(q @ keys.T / 0.1, torch.arange(len(q))), k.detach()
    def enqueue(self, k):
        n = min(len(k), 256 - self.filled)
        self.bank[self.filled : self.filled + n] = k[:n]
        self.filled = (self.filled + n) % 256


rank, world = setup()
scrap = [torch.randn(256, 16) for _ in range(50)]
del scrap
with torch.device("meta"):
    net = Net()
net.to_empty(device="cpu")
for m in net.modules():
    if isinstance(m, nn.Linear):
        m.reset_parameters()
model = DDP(net, broadcast_buffers=False)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
g = torch.Generator().manual_seed(rank)
for step in range(30):
    x = torch.randn(16, 32, generator=g)
    opt.zero_grad()
    loss, keys = model(x, x + 0.1 * torch.randn(16, 32, generator=g))
    loss.backward()
    opt.step()
    every = [torch.empty_like(keys) for _ in range(world)]
    dist.all_gather(every, keys)
    net.enqueue(torch.cat(every))

dist.barrier()
dist.destroy_process_group()
