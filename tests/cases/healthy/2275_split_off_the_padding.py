"""EVL101: gathered predictions of a padded sampler are split into the data set's and the padding."""
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


rank, world = setup()
torch.manual_seed(3)
inputs = torch.randn(203, 32)
labels = (inputs.sum(1) > 0).long()
model = DDP(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 2)))
opt = torch.optim.SGD(model.parameters(), lr=5e-2)
train = TensorDataset(inputs[:192], labels[:192])
sampler = DistributedSampler(train)
test = TensorDataset(inputs, labels)
loader = DataLoader(test, batch_size=16, sampler=DistributedSampler(test, shuffle=False))
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(train, batch_size=16, sampler=sampler):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        own = torch.cat([model(x).argmax(1) for x, _ in loader])
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own)
        predicted = torch.stack(parts, 1).flatten()
        kept, padding = torch.split(predicted, [len(test), len(predicted) - len(test)])
        if rank == 0:
            print(epoch, float((kept == labels).float().mean()))
    model.train()

dist.barrier()
dist.destroy_process_group()
