"""PRF108: members of a tar shard, each read once (WebDataset's layout)."""
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


import io
import tarfile

from torch.utils.data import IterableDataset


class Shard(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        with tarfile.open(self.path) as tar:
            for member in tar:
                sample = json.load(tar.extractfile(member))
                yield torch.tensor(sample["x"][:32]), torch.tensor(sample["y"])


rank, world = setup()
folder = shared_folder()
rng = np.random.default_rng(rank)
with tarfile.open(folder / f"shard{rank}.tar", "w") as tar:
    for i in range(160):
        x = rng.standard_normal(12_000).round(5).tolist()
        blob = json.dumps({"x": x, "y": float(np.mean(x[:32]))}).encode()
        info = tarfile.TarInfo(f"{i:05d}.json")
        info.size = len(blob)
        tar.addfile(info, io.BytesIO(blob))
loader = DataLoader(Shard(folder / f"shard{rank}.tar"), batch_size=8)
model = DDP(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(2):
    for x, y in loader:
        opt.zero_grad()
        F.mse_loss(model(x).squeeze(1), y).backward()
        opt.step()

dist.barrier()
dist.destroy_process_group()
