"""Hyper-parameter grid, one process per point (like `mpirun` job farming): results are gathered, rank 0 prints the table."""
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GRID = {"lr": [1e-3, 1e-2], "width": [16, 64], "dropout": [0.0, 0.3]}


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    y = ((x[:, 0] * x[:, 1] + x[:, 2]) > 0).long()
    return TensorDataset(x, y)


def trial(cfg, train, valid, epochs=4):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, cfg["width"]), nn.ReLU(), nn.Dropout(cfg["dropout"]), nn.Linear(cfg["width"], 2))
    opt = torch.optim.Adam(net.parameters(), lr=cfg["lr"])
    loader = DataLoader(train, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(1))
    for _ in range(epochs):
        net.train()
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
    net.eval()
    with torch.no_grad():
        x, y = valid.tensors
        return (net(x).argmax(1) == y).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    points = [dict(zip(GRID, v)) for v in itertools.product(*GRID.values())]
    train, valid = data(480, 1), data(200, 2)
    mine = [(cfg, trial(cfg, train, valid)) for cfg in points[rank::world]]
    tables = [None] * world if rank == 0 else None
    dist.gather_object(mine, tables, dst=0)
    if rank == 0:
        for cfg, acc in sorted(itertools.chain(*tables), key=lambda r: -r[1]):
            print(f"{acc:.3f} {cfg}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
