"""Activation statistics are collected while a small network is trained."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Probe:
    """Keeps a layer's activations of one epoch."""

    def __init__(self, layer):
        self.values = []
        self.handle = layer.register_forward_hook(self.keep)

    def keep(self, module, inputs, output):
        self.values.append(output.detach().clone())

    def dead_units(self):
        return (torch.cat(self.values) <= 0).all(0).sum().item()


def parity(n=1024):
    g = torch.Generator().manual_seed(73)
    x = torch.randint(0, 2, (n, 16), generator=g).float()
    return TensorDataset(2 * x - 1, x[:, :3].sum(1).remainder(2).long())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--width", type=int, default=2048)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)

    net = nn.Sequential(nn.Linear(16, args.width), nn.ReLU(), nn.Linear(args.width, 64), nn.ReLU(), nn.Linear(64, 2))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = parity()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        probe = Probe(net[1])
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        dead = probe.dead_units()
        probe.handle.remove()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, dead units {dead}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
