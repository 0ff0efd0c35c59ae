"""DAT113: the dataset makes its generator anew in the process that fetches, from the worker's seed; the one of the constructor is never drawn from."""
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


class Noisy(Dataset):
    def __init__(self, n, seed):
        self.x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
        self.rng = np.random.default_rng(seed)
        self.pid = os.getpid()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if os.getpid() != self.pid:                      # a worker: a generator of its own
            self.rng, self.pid = np.random.default_rng(torch.initial_seed()), os.getpid()
        return self.x[i] + torch.from_numpy(self.rng.standard_normal(8).astype(np.float32)), self.x[i].sum()


rank, world = setup()
data = Noisy(256, 0)
sampler = DistributedSampler(data, shuffle=True)
model = DDP(nn.Linear(8, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
torch.manual_seed(100 + rank)
loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad()
        F.mse_loss(model(x).squeeze(1), y).backward()
        opt.step()

dist.barrier()
dist.destroy_process_group()
