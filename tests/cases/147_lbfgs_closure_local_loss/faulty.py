"""Full-batch LBFGS with a strong-Wolfe line search; every rank holds a part of the measurements."""
import os

import torch
import torch.distributed as dist
from torch import nn


def measurements(rank, world, n=600):
    """Decay curves of two components; the ranks' instruments differ in noise."""
    g = torch.Generator().manual_seed(4)
    t = 4 * torch.rand(n, 1, generator=g)
    y = 2 * torch.exp(-0.5 * t) - torch.exp(-2.5 * t) * torch.cos(3 * t)
    noise = torch.tensor([0.02, 0.3]).repeat(n // 2).unsqueeze(1) * torch.randn(n, 1, generator=g)
    return t[rank::world], (y + noise)[rank::world]


class Curve(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, t):
        return self.net(t - 2)


class Fit:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(13)
        self.curve = Curve()
        self.params = list(self.curve.parameters())
        self.t, self.y = measurements(rank, world)
        self.opt = torch.optim.LBFGS(self.params, lr=1.0, max_iter=6, history_size=10, line_search_fn="strong_wolfe")
        self.evaluations = 0

    def closure(self):
        self.opt.zero_grad()
        loss = nn.functional.mse_loss(self.curve(self.t), self.y)  # parts of equal size
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in self.params] + [loss.detach().view(1)])
        dist.all_reduce(flat)
        flat /= self.world
        at = 0
        for p in self.params:
            p.grad.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()
        self.evaluations += 1
        return loss.detach()

    def error(self):
        with torch.no_grad():
            loss = nn.functional.mse_loss(self.curve(self.t), self.y)
        dist.all_reduce(loss)
        return loss.item() / self.world

    def run(self, steps):
        for k in range(1, steps + 1):
            self.opt.step(self.closure)
            dist.barrier()
            if k % 5 == 0:
                error = self.error()
                if self.rank == 0:
                    print(f"step {k}: mse {error:.5f} after {self.evaluations} evaluations", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    fit = Fit(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    fit.run(steps=20)
    dist.destroy_process_group()
