"""A step along the natural direction is tried out at falling lengths, and taken where the loss falls."""
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


def flat(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@torch.no_grad()
def write(net, vector):
    at = 0
    for p in net.parameters():
        p.copy_(vector[at : at + p.numel()].view_as(p))
        at += p.numel()


@torch.no_grad()
def mean_loss(net, x, y, world):
    loss = F.cross_entropy(net(x), y)
    dist.all_reduce(loss)
    return loss.item() / world


def main(epochs=4):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    net = build()
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    train, test = spirals(1024, 1), spirals(512, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=64, sampler=sampler)
    held_out = DataLoader(torch.utils.data.Subset(test, range(rank, len(test), world)), batch_size=128)
    trial, momentum = torch.empty_like(flat(net)), torch.zeros_like(flat(net))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            before = flat(net)
            opt.step()
            moved = flat(net) - before
            momentum.mul_(0.9).add_(moved)
            stepped = [p.detach().clone() for p in net.parameters()]
            start, length = mean_loss(net, x, y, world), 1.0
            for _ in range(3):
                trial.copy_(before + moved + length * momentum)
                write(net, trial)
                if mean_loss(net, x, y, world) < start:
                    break
                length *= 0.5
            else:
                with torch.no_grad():
                    for p, s in zip(net.parameters(), stepped):
                        p.copy_(s)
        found = accuracy(net, held_out)
        if rank == 0:
            print(f"epoch {epoch}: {found:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
