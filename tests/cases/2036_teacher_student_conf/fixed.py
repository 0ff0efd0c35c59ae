"""A small student learns from a larger teacher; settings in dataclasses, `key=value` on the command line."""
import dataclasses
import os
import sys
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset


@dataclass
class Parallel:
    backend: str = "auto"

    @property
    def chosen(self):
        if self.backend != "auto":
            return self.backend
        return "nccl" if torch.cuda.is_available() else "gloo"


@dataclass
class Settings:
    epochs: int = 4
    batch: int = 32
    lr: float = 2e-3
    temperature: float = 2.0
    out: str = "student.pt"
    parallel: Parallel = field(default_factory=Parallel)


def parse(words):
    settings = Settings()
    for word in words:
        key, value = word.split("=", 1)
        owner = settings
        *path, last = key.split(".")
        for part in path:
            owner = getattr(owner, part)
        kind = {f.name: type(getattr(owner, f.name)) for f in dataclasses.fields(owner)}[last]
        setattr(owner, last, kind(value))
    return settings


class Processes:
    """One interface for one process and for many."""

    def __init__(self, parallel):
        self.many = int(os.environ.get("WORLD_SIZE", 1)) > 1 and parallel.chosen is not None
        if self.many:
            dist.init_process_group(parallel.chosen)
        self.rank = dist.get_rank() if self.many else 0
        self.world = dist.get_world_size() if self.many else 1

    def wrap(self, model):
        return nn.parallel.DistributedDataParallel(model) if self.many else model

    def sampler(self, data):
        return DistributedSampler(data, shuffle=True, drop_last=True) if self.many else RandomSampler(data)

    def mean(self, value):
        if self.many:
            dist.all_reduce(value)
        return (value / self.world).item()

    def close(self):
        if self.many:
            dist.barrier()
            dist.destroy_process_group()


def rings(count=1536, classes=5):
    gen = torch.Generator().manual_seed(2)
    label = torch.randint(classes, (count,), generator=gen)
    turn = torch.rand(count, generator=gen) * 6.283
    radius = label * 0.5 + 0.5 + 0.12 * torch.randn(count, generator=gen)
    flat = torch.stack([radius * turn.cos(), radius * turn.sin()], 1)
    lift = torch.randn(2, 20, generator=gen)
    return TensorDataset(flat @ lift + 0.1 * torch.randn(count, 20, generator=gen), label)


def net(width, classes=5):
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))


def pass_over(model, loader, step_loss, optimizer, processes):
    total = torch.zeros(())
    for x, y in loader:
        loss = step_loss(model(x), x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() / len(loader)
    return processes.mean(total)


def main():
    settings = parse(sys.argv[1:])
    processes = Processes(settings.parallel)
    torch.manual_seed(13)
    data = rings()
    sampler = processes.sampler(data)
    loader = DataLoader(data, settings.batch, sampler=sampler, drop_last=True)

    def run(model, step_loss, name):
        optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
        for epoch in range(settings.epochs):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            loss = pass_over(model, loader, step_loss, optimizer, processes)
            if processes.rank == 0:
                print(f"{name} epoch {epoch} loss {loss:.4f}", flush=True)

    teacher = net(256)
    run(processes.wrap(teacher), lambda logits, x, y: F.cross_entropy(logits, y), "teacher")
    teacher.eval().requires_grad_(False)
    student, t = net(48), settings.temperature

    def imitate(logits, x, y):
        goal = F.softmax(teacher(x) / t, 1)
        return t * t * F.kl_div(F.log_softmax(logits / t, 1), goal, reduction="batchmean") + 0.3 * F.cross_entropy(logits, y)

    run(processes.wrap(student), imitate, "student")
    if processes.rank == 0:
        torch.save(student.state_dict(), settings.out)
    processes.close()


if __name__ == "__main__":
    main()
