"""PRF108: a stream of pickled records in one file, each pickle.load reads the next one: nothing is read twice."""
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


from torch.utils.data import IterableDataset


class Records(IterableDataset):
    """One file a rank, thousands of records behind each other, as `pickle.dump` appends them."""

    def __init__(self, path):
        self.path = path

    def __iter__(self):
        with open(self.path, "rb") as f:
            while True:
                try:
                    record = pickle.load(f)
                except EOFError:
                    return
                yield torch.tensor(record["x"][:32]), torch.tensor(record["y"])


rank, world = setup()
folder = shared_folder()
rng = np.random.default_rng(rank)
with open(folder / f"shard{rank}.pkl", "wb") as f:
    for _ in range(200):
        x = rng.standard_normal(60_000).tolist()
        pickle.dump({"x": x, "y": float(np.mean(x[:32]))}, f)
loader = DataLoader(Records(folder / f"shard{rank}.pkl"), batch_size=8)
model = DDP(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(2):
    for x, y in loader:
        opt.zero_grad()
        F.mse_loss(model(x).squeeze(1), y).backward()
        opt.step()

dist.barrier()
dist.destroy_process_group()
