"""signSGD with majority vote and error feedback. Gradients themselves are never averaged; what is summed are signs, residuals stay local."""
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass
class Conf:
    steps: int = 120
    batch: int = 64
    lr: float = 4e-3
    decay: float = 0.98
    width: int = 48


class VotingOptimizer:
    def __init__(self, params, lr):
        self.params = list(params)
        self.lr = lr
        self.err = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        world = dist.get_world_size()
        flat = []
        for p, e in zip(self.params, self.err):
            e.add_(p.grad)                                 # error feedback: what the sign did not carry is tried again
            s = e.sign()
            e.sub_(s * e.abs().mean())
            flat.append(s.flatten())
        votes = torch.cat(flat)
        dist.all_reduce(votes)
        o = 0
        for p in self.params:
            n = p.numel()
            p.add_(votes[o:o + n].view_as(p) / world, alpha=-self.lr)
            o += n

    def zero_grad(self):
        for p in self.params:
            p.grad = None


def teacher(x):
    return torch.sin(x[:, :3]).sum(1, keepdim=True) + 0.5 * x[:, 3:4] * x[:, 4:5]


def main():
    c = Conf()
    dist.init_process_group("gloo")
    r, w = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    net = nn.Sequential(nn.Linear(8, c.width), nn.GELU(), nn.Linear(c.width, c.width), nn.GELU(), nn.Linear(c.width, 1))
    opt = VotingOptimizer(net.parameters(), c.lr)
    g = torch.Generator().manual_seed(500 + r)
    for t in range(c.steps):
        x = torch.randn(c.batch, 8, generator=g)
        loss = nn.functional.mse_loss(net(x), teacher(x))
        opt.zero_grad()
        loss.backward()
        opt.step()
        opt.lr = c.lr * c.decay ** (t / 2)
        if (t + 1) % 30 == 0:
            m = loss.detach().clone()
            dist.all_reduce(m)
            if r == 0:
                print(f"{t + 1:4d} mse {m.item() / w:.4f} lr {opt.lr:.5f}")
    check = torch.stack([p.detach().double().sum() for p in net.parameters()])
    lo, hi = check.clone(), check.clone()
    dist.all_reduce(lo, op=dist.ReduceOp.MIN); dist.all_reduce(hi, op=dist.ReduceOp.MAX)
    assert torch.equal(lo, hi), "replicas drifted"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
