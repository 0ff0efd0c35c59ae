"""Parity of short bit strings; starts its processes with mp.spawn."""
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def pick_port():
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
    s.close()
    return port


def setup(rank, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.set_num_threads(1)


def bit_batches(rank, count, size, bits=5):
    gen = torch.Generator().manual_seed(rank)
    for _ in range(count):
        x = torch.randint(0, 2, (size, bits), generator=gen)
        yield 2.0 * x - 1, (x.sum(1) % 2).float()


class Parity(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


class Meter:
    def __init__(self):
        self.values = torch.zeros(3)

    def add(self, loss, logit, y):
        self.values += torch.tensor([loss.item() * len(y), ((logit > 0) == (y > 0.5)).sum().item(), len(y)])

    def show(self, step, rank):
        dist.all_reduce(self.values)
        loss, acc = (self.values[:2] / self.values[2]).tolist()
        if rank == 0:
            print(f"step {step}: loss {loss:.4f}, accuracy {acc:.3f}", flush=True)
        self.values.zero_()


def run(rank, port):
    setup(rank, port)
    torch.manual_seed(0)
    model = DistributedDataParallel(Parity())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    meter = Meter()
    for step, (x, y) in enumerate(bit_batches(rank, count=160, size=32), start=1):
        logit = model(x)
        loss = nn.functional.binary_cross_entropy_with_logits(logit, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        meter.add(loss, logit.detach(), y)
        if step % 40 == 0:
            meter.show(step, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, args=(pick_port(),), nprocs=WORLD)
