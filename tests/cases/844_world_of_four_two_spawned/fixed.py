"""Spawned data-parallel training."""
import argparse
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def stripes(n=240):
    g = torch.Generator().manual_seed(18)
    x = 4 * torch.rand(n, 2, generator=g)
    return TensorDataset(x, (x[:, 0] + x[:, 1]).floor().long() % 2)


def worker(rank, args, url, world_size):
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = stripes()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
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


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{s.getsockname()[1]}"
    nprocs = torch.cuda.device_count() or 2
    mp.spawn(worker, args=(args, url, nprocs), nprocs=nprocs)


if __name__ == "__main__":
    main()
