"""Starts its own processes; the port is whatever happens to be free."""
import argparse
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def connect(rank, world, port):
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def parity(n=320, bits=6):
    g = torch.Generator().manual_seed(14)
    x = torch.randint(0, 2, (n, bits), generator=g).float()
    return TensorDataset(2 * x - 1, (x.sum(1) % 2).long())


def worker(rank, args):
    connect(rank, args.procs, free_port())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = parity()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    mp.spawn(worker, args=(options,), nprocs=options.procs)
