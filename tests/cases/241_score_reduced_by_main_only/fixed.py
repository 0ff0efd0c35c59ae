"""Energy-based classifier with a periodic report."""
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LOG_EVERY = 10


def global_mean(value):
    t = torch.as_tensor(float(value))
    dist.all_reduce(t)
    return t.item() / dist.get_world_size()


class Report:
    def __init__(self, rank):
        self.rank, self.start = rank, time.perf_counter()

    def __call__(self, step, loss):
        if step % LOG_EVERY:
            return
        mean = global_mean(loss)
        if self.rank == 0:
            rate = step / (time.perf_counter() - self.start)
            print(f"step {step:3d} loss {mean:.4f} {rate:.0f} it/s")


class Energy(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.embed = nn.Linear(dim, 20)
        self.prototypes = nn.Parameter(torch.randn(classes, 20) * 0.3)

    def forward(self, x):
        return -torch.cdist(torch.tanh(self.embed(x)), self.prototypes)


def sample(gen, n=24):
    y = torch.randint(4, (n,), generator=gen)
    x = torch.randn(n, 12, generator=gen)
    x[torch.arange(n), y * 3] += 2.5
    return x, y


def main(steps=40):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Energy(12, 4))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(10 + rank)
    report = Report(rank)
    for step in range(1, steps + 1):
        x, y = sample(gen)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        report(step, loss.detach())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
