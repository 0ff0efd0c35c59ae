"""Asynchronous matrix factorisation: ratings are worked off by several processes."""
import argparse

import torch
import torch.multiprocessing as mp
from torch import nn


class Factors(nn.Module):
    def __init__(self, users, items, rank=6):
        super().__init__()
        self.user = nn.Embedding(users, rank)
        self.item = nn.Embedding(items, rank)
        nn.init.normal_(self.user.weight, std=0.3)
        nn.init.normal_(self.item.weight, std=0.3)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(1)


def ratings(users, items, n=6000):
    g = torch.Generator().manual_seed(20)
    p, q = torch.randn(users, 3, generator=g), torch.randn(items, 3, generator=g)
    u = torch.randint(0, users, (n,), generator=g)
    i = torch.randint(0, items, (n,), generator=g)
    return u, i, (p[u] * q[i]).sum(1)


def rmse(model, table):
    u, i, r = table
    with torch.no_grad():
        return (model(u, i) - r).square().mean().sqrt().item()


def work_off(number, model, table, opts):
    torch.set_num_threads(1)
    torch.manual_seed(opts.seed + number)
    u, i, r = (column[number :: opts.workers] for column in table)
    optimizer = torch.optim.SGD(model.parameters(), lr=opts.lr)
    for sweep in range(opts.sweeps):
        for rows in torch.randperm(len(r)).split(opts.batch_size):
            error = (model(u[rows], i[rows]) - r[rows]).square().sum()
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
    print(f"process {number}: rmse on its part {rmse(model, (u, i, r)):.3f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--sweeps", type=int, default=8)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--seed", type=int, default=0)
    opts = ap.parse_args()
    torch.manual_seed(opts.seed)
    torch.set_num_threads(1)
    table = ratings(80, 60)
    model = Factors(80, 60)
    print(f"start: rmse {rmse(model, table):.3f}", flush=True)

    context = mp.get_context("fork")
    crew = [context.Process(target=work_off, args=(k, model, table, opts)) for k in range(opts.workers)]
    for process in crew:
        process.start()
    for process in crew:
        process.join()
    print(f"end: rmse {rmse(model, table):.3f}")
    torch.save(model.state_dict(), "factors.pt")


if __name__ == "__main__":
    main()
