"""Starts its own worker processes; each trains a replica of a small forecaster."""
import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Series(Dataset):
    def __init__(self, n=288, past=16):
        g = torch.Generator().manual_seed(52)
        t = torch.arange(n + past, dtype=torch.float32)
        self.values = torch.sin(0.31 * t) + 0.5 * torch.sin(0.073 * t + 1) + 0.05 * torch.randn(n + past, generator=g)
        self.n, self.past = n, past

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.values[i : i + self.past], self.values[i + self.past]


def worker(index, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = Series()
    sampler = DistributedSampler(data, num_replicas=args.procs, rank=index)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for past, nxt in loader:
            loss = nn.functional.mse_loss(model(past).squeeze(1), nxt)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if index == 0:
            print(f"epoch {epoch}: mse {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--procs", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    mp.spawn(worker, args=(args,), nprocs=args.procs)


if __name__ == "__main__":
    main()
