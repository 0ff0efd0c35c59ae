"""Train until the smoothed loss is under a target, at most for so many steps."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Smoothed:
    def __init__(self, beta=0.9):
        self.beta, self.value, self.t = beta, 0.0, 0

    def add(self, x):
        self.t += 1
        self.value = self.beta * self.value + (1 - self.beta) * x
        return self.value / (1 - self.beta**self.t)


class Target:
    def __init__(self, threshold, min_steps):
        self.threshold, self.min_steps, self.meter = threshold, min_steps, Smoothed()

    def reached(self, loss, step):
        return self.meter.add(loss.item()) < self.threshold and step >= self.min_steps


def batches(rank, size=32):
    """the second instrument is noisier than the first one"""
    g = torch.Generator().manual_seed(300 + rank)
    noise = 0.02 if rank == 0 else 0.45
    while True:
        x = torch.rand(size, 2, generator=g) * 2 - 1
        y = (x[:, :1] * x[:, 1:]) + noise * torch.randn(size, 1, generator=g)
        yield x, y


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(4)
    model = DDP(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    target = Target(threshold=0.11, min_steps=20)
    for step, (x, y) in enumerate(batches(rank), start=1):
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if target.reached(loss, step) or step == 60:
            break
    print(f"rank {rank}: stopped after {step} steps", flush=True)
    dist.barrier()
    if rank == 0:
        n = sum(p.numel() for p in model.parameters())
        print(f"trained {n} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
