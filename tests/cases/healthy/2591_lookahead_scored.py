"""Lookahead: every five steps the fast weights start again from the slow ones; scored every ten."""
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


class Lookahead:
    def __init__(self, opt, k=5, alpha=0.5):
        self.opt, self.k, self.alpha, self.count = opt, k, alpha, 0
        self.fast = [p for g in opt.param_groups for p in g["params"]]
        self.slow = [p.detach().clone() for p in self.fast]
        self.cached = None

    @torch.no_grad()
    def step(self):
        self.opt.step()
        self.count += 1
        if self.count % self.k == 0:
            self.cached = [p.detach().clone() for p in self.fast]
            for s, p in zip(self.slow, self.fast):
                s.add_(p - s, alpha=self.alpha)
                p.copy_(s)

    def shift(self):
        return sum((c - s).square().sum() for c, s in zip(self.cached, self.slow)).sqrt().item()


def main(epochs=6):
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
    look = Lookahead(opt)
    count = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            look.step()
            count += 1
            if count % 10 == 0:
                found = accuracy(net, held_out)
                if rank == 0:
                    print(f"step {count}: slow weights {found:.3f}, shifted by {look.shift():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
