"""One trunk, one head per hospital; a batch always comes from a single hospital."""
import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler


class Patients(Dataset):
    def __init__(self, per_site=160):
        g = torch.Generator().manual_seed(11)
        self.x = torch.randn(2 * per_site, 10, generator=g)
        self.site = torch.arange(2 * per_site) // per_site
        risk = self.x[:, :4].sum(1)
        self.y = torch.where(self.site == 0, risk, 1.0 - 2.0 * risk)
        self.y = self.y + 0.1 * torch.randn(2 * per_site, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i], int(self.site[i])


class SiteBatches(Sampler):
    """Batches of one site each, spread over the processes."""

    def __init__(self, site, batch_size, rank, world, seed=0):
        self.groups = [(site == s).nonzero().flatten().tolist() for s in (0, 1)]
        self.batch_size, self.rank, self.world, self.seed = batch_size, rank, world, seed
        self.epoch = 0

    def __iter__(self):
        rng = random.Random(1000 * self.seed + self.epoch)
        batches = []
        for group in self.groups:
            order = group[:]
            rng.shuffle(order)
            batches += [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        rng.shuffle(batches)
        usable = len(batches) // self.world * self.world
        return iter(batches[self.rank : usable : self.world])

    def __len__(self):
        return sum(len(g) // self.batch_size for g in self.groups) // self.world


class MultiSite(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])

    def forward(self, x, site):
        return self.heads[site](self.trunk(x)).squeeze(1)


def sync_grads(model, world):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad.div_(world)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    torch.manual_seed(2)
    model = MultiSite()
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    data = Patients()
    batches = SiteBatches(data.site, args.batch_size, rank, world)
    loader = DataLoader(data, batch_sampler=batches)

    for epoch in range(args.epochs):
        batches.epoch = epoch
        total = torch.zeros(2)
        for x, y, site in loader:
            loss = nn.functional.mse_loss(model(x, int(site[0])), y)
            opt.zero_grad()
            loss.backward()
            sync_grads(model, world)
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {(total[0] / total[1]).item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
