"""Hyper-parameter search spread over the ranks, then one data-parallel run with the winner."""
import itertools
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

GRID = [dict(lr=lr, width=w, act=a) for lr, w, a in itertools.product([3e-4, 3e-3, 1e-2], [32, 96], ["relu", "tanh"])]


class Chirps(Dataset):
    """Short noisy signals, target: their frequency class."""

    def __init__(self, n, seed, length=32, classes=6):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(classes, (n,), generator=g)
        t = torch.linspace(0, 1, length)
        f = 2.0 + self.y[:, None].float() * 1.3
        phase = 6.28 * torch.rand(n, 1, generator=g)
        self.x = torch.sin(6.28 * f * t + phase) + 0.5 * torch.randn(n, length, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def build(cfg, seed):
    torch.manual_seed(seed)
    act = {"relu": nn.ReLU, "tanh": nn.Tanh}[cfg["act"]]
    w = cfg["width"]
    return nn.Sequential(nn.Linear(32, w), act(), nn.Linear(w, w), act(), nn.Linear(w, 6))


@torch.no_grad()
def accuracy(net, data):
    net.eval()
    hits = sum((net(x).argmax(1) == y).sum().item() for x, y in DataLoader(data, batch_size=256))
    net.train()
    return hits / len(data)


def trial(cfg, train, valid, epochs=4):
    net = build(cfg, seed=0)
    opt = torch.optim.Adam(net.parameters(), lr=cfg["lr"])
    loader = DataLoader(train, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(3))
    best, bad = 0.0, 0
    for epoch in range(epochs):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
        acc = accuracy(net, valid)
        if acc > best + 0.002:
            best, bad = acc, 0
        else:
            bad += 1
        if best < 0.2 or bad >= 2:
            break                       # a hopeless or finished trial frees this rank for its next one
    return best, epoch + 1


def refit(cfg, data, rank, world, epochs=8):
    model = DDP(build(cfg, seed=11))
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=5)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    opt = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    total = epochs * len(loader)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.5 * (1 + math.cos(math.pi * min(1.0, s / total))))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            sched.step()
            seen += torch.tensor([loss.item() * len(y), float(len(y))])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"refit epoch {epoch} loss {seen[0] / seen[1]:.4f}", flush=True)
    return model.module


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    full, test = Chirps(3000, seed=1), Chirps(1500, seed=2)
    train, valid = Subset(full, range(0, 2400)), Subset(full, range(2400, 3000))

    mine = []
    for number in range(rank, len(GRID), world):
        score, used = trial(GRID[number], train, valid)
        mine.append((score, -number))
        print(f"[rank {rank}] trial {number} {GRID[number]} valid {score:.3f} after {used} epochs", flush=True)

    gathered = [None] * world
    dist.all_gather_object(gathered, mine)
    score, neg = max(itertools.chain.from_iterable(gathered))
    winner = GRID[-neg]
    if rank == 0:
        print(f"winner: trial {-neg} {winner} valid {score:.3f}", flush=True)

    net = refit(winner, full, rank, world)
    if rank == 0:
        print(f"test accuracy {accuracy(net, test):.3f}")
        torch.save({"cfg": winner, "model": net.state_dict()}, "winner.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
