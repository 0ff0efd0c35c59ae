"""Hogwild regression that starts from a flat weight vector (the centre of an earlier search)."""
import argparse

import torch
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def build():
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))


def plant(n, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=gen)
    return x, (x[:, :1] * x[:, 1:2] + x[:, 2:3].sin() + 0.05 * torch.randn(n, 1, generator=gen))


def start_vector(net, seed):
    """Centre of the earlier random search (recomputed here)."""
    gen = torch.Generator().manual_seed(seed)
    size = parameters_to_vector(net.parameters()).numel()
    return torch.randn(8, size, generator=gen).mean(0) * 0.5


def worker(index, net, args):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(args.seed + index)
    x, y = plant(args.samples, 1)
    x, y = x[index :: args.workers], y[index :: args.workers]
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr)
    for _ in range(args.epochs):
        for pick in torch.randperm(len(x), generator=gen).split(args.batch):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x[pick]), y[pick]).backward()
            optimizer.step()


@torch.no_grad()
def test_error(net):
    x, y = plant(200, 2)
    return nn.functional.mse_loss(net(x), y).item()


def prepare(args):
    net = build()
    net.share_memory()
    vector_to_parameters(start_vector(net, args.seed), net.parameters())
    return net


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=3)
    ap.add_argument("--epochs", type=int, default=15)
    ap.add_argument("--samples", type=int, default=600)
    ap.add_argument("--batch", type=int, default=10)
    ap.add_argument("--lr", type=float, default=0.03)
    ap.add_argument("--seed", type=int, default=7)
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    net = prepare(args)
    print(f"before: {test_error(net):.4f}")
    context = mp.get_context("fork")
    workers = [context.Process(target=worker, args=(i, net, args)) for i in range(args.workers)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert all(w.exitcode == 0 for w in workers)
    print(f"after: {test_error(net):.4f}")


if __name__ == "__main__":
    main()
