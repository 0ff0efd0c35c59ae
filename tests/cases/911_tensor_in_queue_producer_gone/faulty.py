"""Federated averaging in one machine: clients train in processes, the server averages their weights."""
import argparse
import copy

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F


def client_data(cid, n=200):
    g = torch.Generator().manual_seed(300 + cid)
    x = torch.randn(n, 10, generator=g) + 0.3 * cid
    return x, (x[:, 0] * x[:, 1] > x[:, 2]).long()


def build():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))


def local_update(cid, state, args, results):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + cid)
    net = build()
    net.load_state_dict(state)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    x, y = client_data(cid)
    for _ in range(args.local_epochs):
        for rows in torch.randperm(len(x)).split(20):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    results.put((cid, len(x), net.state_dict()))


def fed_avg(updates):
    total = sum(n for _, n, _ in updates)
    new = copy.deepcopy(updates[0][2])
    for key in new:
        new[key] = sum(state[key] * (n / total) for _, n, state in updates)
    return new


@torch.no_grad()
def accuracy(state, clients):
    net = build()
    net.load_state_dict(state)
    hits = n = 0
    for c in range(clients):
        x, y = client_data(c)
        hits += (net(x).argmax(1) == y).sum().item()
        n += len(y)
    return hits / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--clients", type=int, default=2)
    ap.add_argument("--local-epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()

    ctx = mp.get_context("fork")
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    state = build().state_dict()
    for r in range(args.rounds):
        results = ctx.Queue()
        clients = [ctx.Process(target=local_update, args=(c, state, args, results)) for c in range(args.clients)]
        for p in clients:
            p.start()
        for p in clients:
            p.join()
        updates = [results.get() for _ in clients]
        state = fed_avg(sorted(updates, key=lambda u: u[0]))
        print(f"round {r}: accuracy {accuracy(state, args.clients):.3f}", flush=True)


if __name__ == "__main__":
    main()
