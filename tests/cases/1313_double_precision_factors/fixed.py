"""Asynchronous matrix factorisation in double precision."""
import argparse

import torch
import torch.multiprocessing as mp
import torch.nn as nn


class Factors(nn.Module):
    def __init__(self, users, items, k):
        super().__init__()
        self.u = nn.Embedding(users, k)
        self.v = nn.Embedding(items, k)
        for e in (self.u, self.v):
            nn.init.normal_(e.weight, std=0.3)

    def forward(self, i, j):
        return (self.u(i) * self.v(j)).sum(1)


def ratings(users, items, n, seed=44):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(users, 3, generator=g, dtype=torch.float64)
    b = torch.randn(items, 3, generator=g, dtype=torch.float64)
    i = torch.randint(0, users, (n,), generator=g)
    j = torch.randint(0, items, (n,), generator=g)
    return i, j, (a[i] * b[j]).sum(1)


def learn(part, args, model, lock, table):
    torch.set_num_threads(1)
    i, j, r = (column[part :: args.parts] for column in table)
    g = torch.Generator().manual_seed(args.seed + part)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        for pick in torch.randperm(len(r), generator=g).split(args.batch_size):
            with lock:
                loss = (model(i[pick], j[pick]) - r[pick]).pow(2).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        print(f"part {part} epoch {epoch}: loss {loss.item():.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--parts", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=1.0)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    torch.manual_seed(args.seed)

    table = ratings(30, 25, 1200)
    model = Factors(30, 25, 4).double()
    model.share_memory()
    ctx = mp.get_context("fork")
    lock = ctx.Lock()
    jobs = [ctx.Process(target=learn, args=(k, args, model, lock, table)) for k in range(args.parts)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    with torch.no_grad():
        rmse = (model(table[0], table[1]) - table[2]).pow(2).mean().sqrt().item()
    print(f"rmse over all ratings {rmse:.4f}")
    torch.save(model.state_dict(), "factors.pt")


if __name__ == "__main__":
    main()
