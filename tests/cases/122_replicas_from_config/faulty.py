"""Digits of a seven-segment display. Starts its own processes; settings come from a file."""
import json
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

DEFAULTS = {"num_gpus": 4, "max_procs": 2, "epochs": 6, "batch": 16, "lr": 0.1}
SEGMENTS = ["1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011"]


class SevenSegments(Dataset):
    def __init__(self, n=640, seed=0):
        g = torch.Generator().manual_seed(seed)
        table = torch.tensor([[float(c) for c in row] for row in SEGMENTS])
        self.digit = torch.randint(0, 10, (n,), generator=g)
        flip = torch.rand(n, 7, generator=g) < 0.02
        clean = table[self.digit]
        self.x = torch.where(flip, 1 - clean, clean) + 0.15 * torch.randn(n, 7, generator=g)

    def __len__(self):
        return len(self.digit)

    def __getitem__(self, i):
        return self.x[i], self.digit[i]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train_one_epoch(model, loader, opt):
    stats = torch.zeros(3)
    for x, digit in loader:
        out = model(x)
        loss = nn.functional.cross_entropy(out, digit)
        opt.zero_grad()
        loss.backward()
        opt.step()
        stats += torch.tensor([loss.item() * len(x), (out.argmax(1) == digit).sum().item(), len(x)])
    dist.all_reduce(stats)
    return stats


def worker(rank, world_size, port, cfg):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 10)))
    opt = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=0.9)
    data = SevenSegments()
    sampler = DistributedSampler(data, num_replicas=cfg["num_gpus"], rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=cfg["batch"], sampler=sampler)
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        loss, hits, n = train_one_epoch(model, loader, opt).tolist()
        if rank == 0:
            print(f"epoch {epoch}: {int(n)} samples, loss {loss / n:.4f}, accuracy {hits / n:.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "segments.pt")
    dist.barrier()
    dist.destroy_process_group()


def main():
    if not os.path.exists("train.json"):
        with open("train.json", "w") as f:
            json.dump(DEFAULTS, f, indent=2)
    with open("train.json") as f:
        cfg = json.load(f)
    nprocs = min(cfg["num_gpus"], cfg["max_procs"])
    mp.spawn(worker, args=(nprocs, free_port(), cfg), nprocs=nprocs)


if __name__ == "__main__":
    main()
