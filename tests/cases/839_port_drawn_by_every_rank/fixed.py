"""Survival-time regression, started with torchrun."""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def patients(n=256):
    g = torch.Generator().manual_seed(57)
    x = torch.randn(n, 7, generator=g)
    risk = (0.6 * x[:, 0] - 0.4 * x[:, 1] * x[:, 2]).exp()
    return TensorDataset(x, -torch.rand(n, generator=g).log() / risk)


def setup():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(random.randint(20000, 60000)))
    dist.init_process_group("gloo")
    return dist.get_rank()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()
    rank = setup()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(7, 24), nn.SiLU(), nn.Linear(24, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = patients()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, time_to_event in loader:
            log_risk = model(x).squeeze(1)
            loss = (log_risk.exp() * time_to_event - log_risk).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
