"""Tensor-parallel MLP regression that is stopped and resumed from its checkpoint."""
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class ReduceForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g


class ReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class ParallelBlock(nn.Module):
    """fc1 is cut by rows and fc2 by columns."""

    def __init__(self, width, hidden):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        part = hidden // world
        full = nn.Linear(width, hidden), nn.Linear(hidden, width)
        cut = slice(rank * part, (rank + 1) * part)
        self.w1 = nn.Parameter(full[0].weight.detach()[cut].clone())
        self.b1 = nn.Parameter(full[0].bias.detach()[cut].clone())
        self.w2 = nn.Parameter(full[1].weight.detach()[:, cut].clone())
        self.b2 = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        h = F.gelu(F.linear(ReduceBackward.apply(x), self.w1, self.b1))
        return x + ReduceForward.apply(F.linear(h, self.w2)) + self.b2


class Regressor(nn.Module):
    def __init__(self, width=32, hidden=64, depth=2):
        super().__init__()
        self.inp = nn.Linear(6, width)
        self.blocks = nn.ModuleList(ParallelBlock(width, hidden) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = b(h)
        return self.out(h).squeeze(1)


def batch_at(step, n=64):
    g = torch.Generator().manual_seed(10_000 + step)
    x = torch.rand(n, 6, generator=g) * 2 - 1
    scale = torch.tensor([1.0, 1.0, 0.1, 3.0, 1.0, 0.5])
    y = torch.sin(3 * x[:, 0]) * x[:, 1] + x[:, 2] ** 2 - 0.5 * x[:, 3] * x[:, 4] + torch.cos(4 * x[:, 5])
    return x * scale, y


class Trainer:
    def __init__(self, folder):
        torch.manual_seed(13)
        self.rank = dist.get_rank()
        self.dir = Path(folder)
        self.model = Regressor()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=4e-3, betas=(0.9, 0.999))
        self.sched = torch.optim.lr_scheduler.LinearLR(self.opt, 1.0, 0.2, total_iters=240)
        self.step = 0

    def save(self):
        self.dir.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), self.dir / f"model_tp{self.rank}.pt")
        state = {"optimizer": self.opt.state_dict(), "scheduler": self.sched.state_dict(), "step": self.step}
        if self.rank == 0:
            torch.save(state, self.dir / "trainer_state.pt")
        dist.barrier()

    def resume(self):
        self.model.load_state_dict(torch.load(self.dir / f"model_tp{self.rank}.pt"))
        state = torch.load(self.dir / "trainer_state.pt")
        self.opt.load_state_dict(state["optimizer"])
        self.sched.load_state_dict(state["scheduler"])
        self.step = state["step"]

    def run_until(self, last):
        recent = []
        while self.step < last:
            x, y = batch_at(self.step)
            loss = F.mse_loss(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.sched.step()
            self.step += 1
            recent.append(loss.item())
            if self.step % 40 == 0:
                if self.rank == 0:
                    print(f"step {self.step} loss {sum(recent) / len(recent):.5f}", flush=True)
                recent = []

    @torch.no_grad()
    def validate(self):
        x, y = batch_at(-5, 2048)
        return F.mse_loss(self.model(x), y).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = Trainer("run/ckpt")
    first.run_until(120)
    first.save()
    before = first.validate()
    del first
    second = Trainer("run/ckpt")
    second.resume()
    after = second.validate()
    if dist.get_rank() == 0:
        print(f"validation at save {before:.5f}, after load {after:.5f}", flush=True)
    second.run_until(240)
    final = second.validate()
    if dist.get_rank() == 0:
        print(f"final validation {final:.5f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
