"""Starts its own processes; no launcher needed."""
import argparse
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

HOST = "127.0.0.1"


def free_port():
    with socket.socket() as s:
        s.bind((HOST, 0))
        return s.getsockname()[1]


def surfaces(n=320):
    g = torch.Generator().manual_seed(46)
    x = 2 * torch.rand(n, 3, generator=g) - 1
    return TensorDataset(x, x[:, :1] * x[:, 1:2] + torch.sin(2 * x[:, 2:]))


def train(rank, args):
    torch.manual_seed(0)
    data = surfaces()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "surface.pt")


def worker(rank, world, args):
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, free_port(), world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    train(rank, args)
    dist.barrier()
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--processes", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()
    mp.spawn(worker, args=(args.processes, args), nprocs=args.processes)


if __name__ == "__main__":
    main()
