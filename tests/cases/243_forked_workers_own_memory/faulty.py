"""Hogwild on a sparse linear model: forked workers update one weight vector without locks."""
import argparse
import multiprocessing as mp

import torch
from torch import nn


class SparseLinear(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weights = nn.EmbeddingBag(features, 1, mode="sum", sparse=False)
        self.bias = nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.weights.weight)

    def forward(self, ids):
        return (self.weights(ids) + self.bias).squeeze(1)


def documents(gen, n, features):
    ids = torch.randint(features, (n, 8), generator=gen)
    score = (ids % 7 - 3).float().sum(1)
    return ids, (score > 0).float()


def worker(index, model, args):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(args.seed + 1 + index)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    for _ in range(args.steps):
        ids, y = documents(gen, args.batch, args.features)
        opt.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(ids), y).backward()
        opt.step()


@torch.no_grad()
def accuracy(model, args):
    ids, y = documents(torch.Generator().manual_seed(args.seed), 1000, args.features)
    return ((model(ids) > 0) == (y > 0.5)).float().mean().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--features", type=int, default=300)
    p.add_argument("--lr", type=float, default=4.0)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    torch.set_num_threads(1)
    ctx = mp.get_context("fork")
    model = SparseLinear(args.features)
    print(f"before: accuracy {accuracy(model, args):.3f}")
    processes = [ctx.Process(target=worker, args=(i, model, args)) for i in range(args.workers)]
    for proc in processes:
        proc.start()
    for proc in processes:
        proc.join()
    if any(proc.exitcode for proc in processes):
        raise SystemExit("a worker failed")
    print(f"after:  accuracy {accuracy(model, args):.3f}")


if __name__ == "__main__":
    main()
