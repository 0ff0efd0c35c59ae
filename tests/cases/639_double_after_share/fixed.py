"""Hogwild fit of a physics surrogate in double precision (forked workers)."""
import argparse

import torch
import torch.multiprocessing as mp
from torch import nn


class Surrogate(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x)


def samples(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, generator=g, dtype=torch.float64) * 2 - 1
    y = (x[:, :1] * 3.0).sin() * x[:, 1:2] + x[:, 2:] ** 2
    return x, y


def worker(k, model, args, done):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + k)
    x, y = samples(args.samples, args.seed + 10 * k)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        for idx in torch.randperm(len(x)).split(args.batch_size):
            opt.zero_grad()
            nn.functional.mse_loss(model(x[idx]), y[idx]).backward()
            opt.step()
        done[k] = epoch + 1


@torch.no_grad()
def error(model):
    x, y = samples(400, 999)
    return nn.functional.mse_loss(model(x), y).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--samples", type=int, default=400)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = Surrogate()
    model.double().share_memory()
    print(f"before: {error(model):.4f}")
    ctx = mp.get_context("fork")
    done = torch.zeros(args.workers, dtype=torch.long).share_memory_()
    procs = [ctx.Process(target=worker, args=(k, model, args, done)) for k in range(args.workers)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
    assert all(p.exitcode == 0 for p in procs), "a worker failed"
    print(f"after {done.tolist()} epochs: {error(model):.4f}")


if __name__ == "__main__":
    main()
