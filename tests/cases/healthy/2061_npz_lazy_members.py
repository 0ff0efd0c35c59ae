"""PRF108: one npz archive stays open, each sample is a member of its own, read lazily once: nothing is read twice."""
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


class Archive(Dataset):
    """More than fits in memory: every sample is its own member of the archive, unpacked when it is asked for."""

    def __init__(self, path):
        self.archive = np.load(path)
        self.keys = self.archive.files

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, i):
        x = self.archive[self.keys[i]]
        return torch.from_numpy(x[:64].copy()), torch.tensor(float(x.mean()) * 50)


rank, world = setup()
folder = shared_folder()
if rank == 0:
    rng = np.random.default_rng(0)
    np.savez_compressed(folder / "scans.npz", **{f"scan{i:04d}": rng.standard_normal(60_000).astype(np.float32) for i in range(320)})
dist.barrier()
data = Archive(folder / "scans.npz")
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad()
        F.mse_loss(model(x).squeeze(1), y).backward()
        opt.step()

dist.barrier()
dist.destroy_process_group()
