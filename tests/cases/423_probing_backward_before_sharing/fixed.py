"""Hogwild matrix factorisation with a learning rate from the first gradient's norm."""
import os

import torch
import torch.multiprocessing as mp
from torch import nn

torch.set_num_threads(1)


class Factors(nn.Module):
    def __init__(self, users=80, items=60, k=8):
        super().__init__()
        self.u = nn.Parameter(torch.randn(users, k) * 0.3)
        self.v = nn.Parameter(torch.randn(items, k) * 0.3)
        self.bias = nn.Parameter(torch.zeros(items))

    def forward(self, user, item):
        return (self.u[user] * self.v[item]).sum(1) + self.bias[item]


def ratings(seed, n):
    g = torch.Generator().manual_seed(seed)
    user, item = torch.randint(0, 80, (n,), generator=g), torch.randint(0, 60, (n,), generator=g)
    return user, item, torch.sin(user * 0.3) * torch.cos(item * 0.2)


def loss_on(net, batch):
    user, item, r = batch
    return nn.functional.mse_loss(net(user, item), r)


def suggest_lr(net, target=0.15):
    """so that the first step has about this length"""
    loss_on(net, ratings(0, 512)).backward()
    norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm().item()
    net.zero_grad(set_to_none=True)
    return target / norm


def trainer(net, lr, seed, steps):
    torch.set_num_threads(1)
    opt = torch.optim.SGD(net.parameters(), lr=lr)
    for step in range(steps):
        opt.zero_grad(set_to_none=False)
        loss_on(net, ratings(seed * 1000 + step, 256)).backward()
        opt.step()


def main():
    torch.manual_seed(0)
    net = Factors()
    lr = suggest_lr(net)
    net.share_memory()
    with torch.no_grad():
        print(f"pid {os.getpid()} lr {lr:.2f} start {loss_on(net, ratings(999, 2000)).item():.4f}")
    ctx = mp.get_context("fork")
    workers = [ctx.Process(target=trainer, args=(net, lr, s, 80)) for s in (1, 2)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    assert all(w.exitcode == 0 for w in workers)
    with torch.no_grad():
        print(f"end {loss_on(net, ratings(999, 2000)).item():.4f}")


if __name__ == "__main__":
    main()
