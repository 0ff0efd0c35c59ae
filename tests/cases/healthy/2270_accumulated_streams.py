"""SYN119: streams of other lengths, two batches a step; the ranks agree before each step whether all have two more, else they end the epoch."""
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


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, num): self.num = num
    def __iter__(self):
        for i in range(self.num):
            yield torch.randn(32)


rank, world = setup()
torch.manual_seed(rank)
model = DDP(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)))
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for epoch in range(4):
    batches = iter(DataLoader(Stream(160 + 70 * rank), batch_size=8))
    while True:
        two = [b for b in (next(batches, None), next(batches, None)) if b is not None]
        more = torch.tensor(float(len(two) == 2))
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
        if not more:
            break
        opt.zero_grad()
        with model.no_sync():
            (F.mse_loss(model(two[0]).squeeze(1), two[0].sum(1)) / 2).backward()
        (F.mse_loss(model(two[1]).squeeze(1), two[1].sum(1)) / 2).backward()
        opt.step()

dist.barrier()
dist.destroy_process_group()
