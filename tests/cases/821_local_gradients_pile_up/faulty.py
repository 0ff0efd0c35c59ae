"""Shared value network, workers push gradients of their local network."""
import argparse

import torch
import torch.multiprocessing as mp
from torch import nn


class ValueNet(nn.Module):
    def __init__(self, obs=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(obs, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, s):
        return self.layers(s).squeeze(-1)


def returns(gen, n=24):
    """States of a noisy pendulum and the discounted return from there."""
    s = torch.randn(n, 4, generator=gen)
    value = -(s[:, 0] ** 2) - 0.3 * s[:, 1] ** 2 + 0.2 * s[:, 2]
    return s, value + 0.1 * torch.randn(n, generator=gen)


def push_and_pull(opt, local, shared):
    opt.zero_grad()
    for lp, sp in zip(local.parameters(), shared.parameters()):
        sp._grad = lp.grad
    opt.step()
    local.load_state_dict(shared.state_dict())


class Worker(mp.get_context("fork").Process):
    def __init__(self, wid, shared, args):
        super().__init__()
        self.wid, self.shared, self.args = wid, shared, args

    def run(self):
        torch.set_num_threads(1)
        gen = torch.Generator().manual_seed(self.args.seed + self.wid)
        local = ValueNet()
        local.load_state_dict(self.shared.state_dict())
        opt = torch.optim.SGD(self.shared.parameters(), lr=self.args.lr)
        for _ in range(self.args.iters):
            s, v = returns(gen)
            loss = nn.functional.smooth_l1_loss(local(s), v)
            loss.backward()
            push_and_pull(opt, local, self.shared)
        print(f"worker {self.wid}: loss {loss.item():.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--iters", type=int, default=200)
    ap.add_argument("--lr", type=float, default=0.03)
    ap.add_argument("--seed", type=int, default=2)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    shared = ValueNet()
    shared.share_memory()
    workers = [Worker(i, shared, args) for i in range(args.workers)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    s, v = returns(torch.Generator().manual_seed(500), n=400)
    with torch.no_grad():
        print(f"test loss {nn.functional.smooth_l1_loss(shared(s), v).item():.4f}")


if __name__ == "__main__":
    main()
