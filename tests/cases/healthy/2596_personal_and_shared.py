"""Ditto: a shared model, and a personal one that is trained by turns in the same module."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 4 * r + y * 2.0944 + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([r * a.cos(), r * a.sin()], 1), y)


def build():
    return nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.stack([(net(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    net.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


@torch.no_grad()
def put(net, values):
    for p, v in zip(net.parameters(), values):
        p.copy_(v)


def take(net):
    return [p.detach().clone() for p in net.parameters()]


def main(rounds=8):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    net = build()
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    personal = take(net)
    mine = DataLoader(spirals(512, 70 + rank), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(rank))
    held_out = DataLoader(torch.utils.data.Subset(spirals(512, 2), range(rank, 512, world)), batch_size=128)
    for turn in range(rounds):
        for x, y in mine:
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
        with torch.no_grad():
            for p in net.parameters():
                dist.all_reduce(p)
                p /= world
        shared = take(net)
        put(net, personal)
        own = accuracy(net, held_out)
        for x, y in mine:
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y) + 0.05 * sum((p - s).square().sum() for p, s in zip(net.parameters(), shared))
            loss.backward()
            opt.step()
        for old, new in zip(personal, net.parameters()):
            old.copy_(new.detach())
        put(net, shared)
        found = accuracy(net, held_out)
        if rank == 0:
            print(f"round {turn}: shared {found:.3f}, personal {own:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
