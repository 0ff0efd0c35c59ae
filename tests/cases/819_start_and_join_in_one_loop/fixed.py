"""Asynchronous training of a digit-sum network."""
import argparse
import time

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F


class SumNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.head = nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, 28))

    def forward(self, digits):
        return self.head(self.embed(digits).sum(1))


def batch(gen, n=64):
    digits = torch.randint(0, 10, (n, 3), generator=gen)
    return digits, digits.sum(1)


def work(wid, model, args):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(args.seed * 31 + wid)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    for it in range(args.iters):
        digits, total = batch(gen)
        loss = F.cross_entropy(model(digits), total)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"worker {wid} done, loss {loss.item():.3f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=3)
    ap.add_argument("--iters", type=int, default=300)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=4)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    ctx = mp.get_context("fork")
    model = SumNet()
    model.share_memory()

    start = time.time()
    procs = [ctx.Process(target=work, args=(wid, model, args)) for wid in range(args.workers)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
    digits, total = batch(torch.Generator().manual_seed(5), n=500)
    with torch.no_grad():
        acc = (model(digits).argmax(1) == total).float().mean().item()
    print(f"{args.workers} workers: {time.time() - start:.1f} s, accuracy {acc:.3f}")


if __name__ == "__main__":
    main()
