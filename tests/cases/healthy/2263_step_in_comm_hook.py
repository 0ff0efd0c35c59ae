"""SYN127: weights are updated inside of the backward, in DDP's communication hook, when the bucket has been averaged."""
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
net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
model = DDP(net, gradient_as_bucket_view=True)
opts = {p: torch.optim.SGD([p], lr=1e-2) for p in net.parameters()}


def average_and_step(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(world), async_op=True).get_future()
    def then(future):
        with torch.no_grad():
            for p, grad in zip(bucket.parameters(), bucket.gradients()):
                p.grad = grad
                opts[p].step()
        return bucket.buffer()
    return work.then(then)


model.register_comm_hook(None, average_and_step)
g = torch.Generator().manual_seed(rank)
for step in range(30):
    x = torch.randn(16, 32, generator=g)
    model.zero_grad(set_to_none=False)
    F.mse_loss(model(x).squeeze(1), x.sum(1)).backward()

dist.barrier()
dist.destroy_process_group()
