"""PRF111: the replay buffer grows in every round, workers hold it as it was when they were forked: the loader's workers must be started anew."""
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


class Buffer(Dataset):
    def __init__(self): self.rows = []
    def __len__(self): return len(self.rows)
    def __getitem__(self, i):
        row = self.rows[i]
        return torch.tanh(row), row.sum()


rank, world = setup()
model = DDP(nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1)))
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
buffer = Buffer()
g = torch.Generator().manual_seed(rank)
policy = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))
for round in range(14):
    with torch.no_grad():                      # play
        state = torch.randn(32, generator=g)
        for _ in range(900):
            state = torch.tanh(policy(state)) + 0.1 * torch.randn(32, generator=g)
        buffer.rows.extend(torch.randn(64, 32, generator=g))
    loader = DataLoader(buffer, batch_size=32, shuffle=True, num_workers=2, generator=g)
    batches = iter(loader)
    for _ in range(2):
        x, y = next(batches)
        opt.zero_grad()
        F.mse_loss(model(x).squeeze(1), y).backward()
        opt.step()

dist.barrier()
dist.destroy_process_group()
