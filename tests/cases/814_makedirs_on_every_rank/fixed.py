"""Experiment folder with settings, log and weights."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def checkerboard(n=256):
    g = torch.Generator().manual_seed(91)
    x = 4 * torch.rand(n, 2, generator=g)
    return TensorDataset(x, (x.floor().sum(1) % 2).long())


def prepare(args, rank):
    folder = os.path.join(args.out, args.name)
    os.makedirs(folder, exist_ok=True)
    if rank == 0:
        with open(os.path.join(folder, "args.json"), "w") as f:
            json.dump(vars(args), f, indent=1)
    return folder


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="runs")
    ap.add_argument("--name", default="checkerboard")
    ap.add_argument("--epochs", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    folder = prepare(args, rank)
    torch.manual_seed(0)

    model = DDP(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = checkerboard()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    history = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        history.append(total.item() / len(loader) / dist.get_world_size())

    if rank == 0:
        with open(os.path.join(folder, "history.json"), "w") as f:
            json.dump(history, f)
        torch.save(model.module.state_dict(), os.path.join(folder, "last.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
