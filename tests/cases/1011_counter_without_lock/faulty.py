"""Hogwild with a shared step budget: workers stop when the common counter reaches it."""
import argparse
import time

import torch
import torch.multiprocessing as mp
from torch import nn


def make_batch(gen, n=24):
    x = torch.randn(n, 8, generator=gen)
    return x, (x[:, :4].sum(1, keepdim=True) > x[:, 4:].sum(1, keepdim=True)).float()


def run_worker(idx, opt, model, counter):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(opt.seed + idx)
    optimizer = torch.optim.SGD(model.parameters(), lr=opt.lr)
    mine = 0
    while counter.value < opt.budget:
        x, y = make_batch(gen)
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counter.value += 1
        mine += 1
        if mine % 200 == 0:
            print(f"worker {idx}: {mine} steps, {counter.value} in all, loss {loss.item():.3f}", flush=True)
    print(f"worker {idx} done after {mine} steps", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=3)
    ap.add_argument("--budget", type=int, default=1500)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=2)
    opt = ap.parse_args()
    torch.manual_seed(opt.seed)
    ctx = mp.get_context("fork")
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model.share_memory()
    counter = ctx.Value("i", 0)
    began = time.time()
    procs = [ctx.Process(target=run_worker, args=(i, opt, model, counter)) for i in range(opt.workers)]
    [p.start() for p in procs]
    [p.join() for p in procs]
    x, y = make_batch(torch.Generator().manual_seed(77), 400)
    with torch.no_grad():
        acc = ((model(x) > 0).float() == y).float().mean().item()
    print(f"{counter.value} steps in {time.time() - began:.1f} s, accuracy {acc:.3f}")


if __name__ == "__main__":
    main()
