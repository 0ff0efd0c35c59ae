"""Hogwild regression with a few workers."""
import argparse
import copy

import torch
import torch.multiprocessing as mp
import torch.nn as nn


def sample(gen, n=32):
    x = 2 * torch.rand(n, 3, generator=gen) - 1
    return x, (x[:, :1] - x[:, 1:2] * x[:, 2:]).sin()


def train(worker, model, steps, lr, seed):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(seed + worker)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        x, y = sample(gen)
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"worker {worker}: {steps} steps, last loss {loss.item():.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()

    torch.manual_seed(args.seed)
    ctx = mp.get_context("fork")
    model = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))
    model.share_memory()

    workers = []
    for w in range(args.workers):
        local = copy.deepcopy(model)  # own gradients for each worker
        p = ctx.Process(target=train, args=(w, local, args.steps, args.lr, args.seed))
        p.start()
        workers.append(p)
    for p in workers:
        p.join()

    x, y = sample(torch.Generator().manual_seed(99), n=400)
    with torch.no_grad():
        print(f"test loss {nn.functional.mse_loss(model(x), y).item():.4f}")


if __name__ == "__main__":
    main()
