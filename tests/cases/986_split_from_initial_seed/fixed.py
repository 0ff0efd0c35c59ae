"""Small-data classification with a held-out part. Spawns its own workers."""
import os
import random
import socket

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

OPTIONS = {"seed": 1234, "epochs": 4, "batch": 10, "lr": 3e-3, "holdout": 0.25, "workers": 2}


# --------------------------------------------------------------- utilities
def set_seed(seed, rank):
    """Different noise and dropout on every rank."""
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    torch.manual_seed(seed + rank)


def fresh_generator(seed=None):
    return torch.Generator().manual_seed(OPTIONS["seed"] if seed is None else seed)


def holdout(dataset, fraction, generator):
    order = torch.randperm(len(dataset), generator=generator).tolist()
    cut = int(len(order) * fraction)
    return Subset(dataset, order[cut:]), Subset(dataset, order[:cut])


# -------------------------------------------------------------------- task
def cells():
    gen = fresh_generator(seed=5)
    x = torch.randn(320, 16, generator=gen)
    y = (x[:, :3].prod(1) > 0).long()
    return TensorDataset(x, y)


def network():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def validate(model, part, rank, world):
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for i in range(rank, len(part), world):
            x, y = part[i]
            counts += torch.tensor([float(model(x[None]).argmax() == y), 1.0])
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def work(rank, world, port):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    set_seed(OPTIONS["seed"], rank)
    train, held_out = holdout(cells(), OPTIONS["holdout"], fresh_generator())
    model = DDP(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=OPTIONS["lr"])
    sampler = DistributedSampler(train, seed=OPTIONS["seed"])
    loader = DataLoader(train, batch_size=OPTIONS["batch"], sampler=sampler)
    for epoch in range(OPTIONS["epochs"]):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        acc = validate(model, held_out, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: held-out accuracy {acc:.3f}")
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    mp.spawn(work, args=(OPTIONS["workers"], free_port()), nprocs=OPTIONS["workers"])
