"""Hogwild: several processes train one multinomial regression with a hidden layer."""
import argparse

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F


def clusters(n, seed):
    centre = 2.0 * torch.randn(6, 10, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    return centre[y] + torch.randn(n, 10, generator=g), y


def make_net():
    return nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 6))


def train_process(number, args, net):
    torch.set_num_threads(1)
    x, y = clusters(args.samples, seed=number)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr)
    shuffle = torch.Generator().manual_seed(1000 + number)
    for epoch in range(args.epochs):
        total = 0.0
        for idx in torch.randperm(len(x), generator=shuffle).split(args.batch):
            opt.zero_grad()
            loss = F.cross_entropy(net(x[idx]), y[idx])
            loss.backward()
            opt.step()
            total += loss.item() * len(idx)
        print(f"worker {number} epoch {epoch}: loss {total / len(x):.4f}", flush=True)


@torch.no_grad()
def accuracy(net):
    x, y = clusters(1000, seed=12345)
    return (net(x).argmax(1) == y).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--num-processes", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--samples", type=int, default=480)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()

    torch.set_num_threads(1)  # a thread pool does not survive the fork
    torch.manual_seed(0)
    net = make_net()
    ctx = mp.get_context("fork")
    workers = [ctx.Process(target=train_process, args=(k, args, net)) for k in range(args.num_processes)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    if any(w.exitcode for w in workers):
        raise SystemExit("a worker failed")
    torch.save(net.state_dict(), "hogwild.pt")
    print(f"accuracy of the common network: {accuracy(net):.3f}")


if __name__ == "__main__":
    main()
