"""DDP communication hooks: PowerSGD on the big layer's gradients, compressed to bf16 in a second run."""
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def register(model, kind):
    if kind == "powersgd":
        state = powerSGD.PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=4, min_compression_rate=1.5)
        model.register_comm_hook(state, powerSGD.powerSGD_hook)
    elif kind == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    else:
        model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)


def regression(n=512, d=40):
    g = torch.Generator().manual_seed(8)
    x = torch.randn(n, d, generator=g)
    return TensorDataset(x, (x @ torch.randn(d, 4, generator=g) / d**0.5).sin())


def train(kind, data, rank):
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)))
    register(model, kind)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
    with torch.no_grad():
        x, y = data.tensors
        part = slice(rank, None, dist.get_world_size())
        se = ((model.module(x[part]) - y[part]) ** 2).sum()
    dist.all_reduce(se)
    if rank == 0:
        print(f"{kind:>9}: final mse {se.item() / y.numel():.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for kind in sys.argv[1:] or ["powersgd", "bf16"]:
        train(kind, regression(), dist.get_rank())
    dist.destroy_process_group()
