"""Hogwild training of a wide regression net, started with fork to share the data for free."""
import argparse
import multiprocessing as mp

import torch
from torch import nn


def make_data(n=3000, dim=200):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, dim, generator=g)
    return x, torch.tanh(x @ torch.randn(dim, 3, generator=g) / dim**0.5)


def make_net(dim=200, width=400):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(dim, width), nn.Tanh(), nn.Linear(width, 3))


def mse(net, data):
    with torch.no_grad():
        return nn.functional.mse_loss(net(data[0]), data[1]).item()


def work(k, net, data, args):
    gen = torch.Generator().manual_seed(100 + k)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr)
    for _ in range(args.steps):
        index = torch.randint(0, len(data[0]), (args.batch,), generator=gen)
        opt.zero_grad()
        nn.functional.mse_loss(net(data[0][index]), data[1][index]).backward()
        opt.step()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    torch.set_num_threads(1)
    data, net = make_data(), make_net()
    net.share_memory()
    print(f"untrained: {mse(net, data):.4f}", flush=True)
    ctx = mp.get_context("fork")
    procs = [ctx.Process(target=work, args=(k, net, data, args)) for k in range(args.workers)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
    print(f"trained: {mse(net, data):.4f}")


if __name__ == "__main__":
    main()
