"""Event-driven trainer: everything but the forward is a handler on the engine."""
import enum
import os
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Event(enum.Enum):
    EPOCH_STARTED = 0
    ITERATION_STARTED = 1
    BACKWARD_COMPLETED = 2
    ITERATION_COMPLETED = 3
    EPOCH_COMPLETED = 4


class Engine:
    def __init__(self, process):
        self.process, self.handlers, self.epoch, self.iteration = process, defaultdict(list), 0, 0

    def on(self, event):
        def register(fn):
            self.handlers[event].append(fn)
            return fn
        return register

    def fire(self, event):
        for fn in self.handlers[event]:
            fn(self)

    def run(self, loader, epochs):
        for self.epoch in range(epochs):
            self.fire(Event.EPOCH_STARTED)
            for self.batch in loader:
                self.fire(Event.ITERATION_STARTED)
                self.output = self.process(self, self.batch)
                self.fire(Event.BACKWARD_COMPLETED)
                self.iteration += 1
                self.fire(Event.ITERATION_COMPLETED)
            self.fire(Event.EPOCH_COMPLETED)


def attach_optimizer(engine, optimizer, model, max_norm):
    @engine.on(Event.ITERATION_STARTED)
    def clear(engine):
        optimizer.zero_grad()

    @engine.on(Event.BACKWARD_COMPLETED)
    def step(engine):
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


def attach_logging(engine, rank):
    @engine.on(Event.EPOCH_STARTED)
    def reset(engine):
        engine.sums = torch.zeros(2)

    @engine.on(Event.ITERATION_COMPLETED)
    def add(engine):
        engine.sums += torch.tensor([engine.output, 1.0])

    @engine.on(Event.EPOCH_COMPLETED)
    def show(engine):
        dist.all_reduce(engine.sums)
        if rank == 0:
            print(f"epoch {engine.epoch} iteration {engine.iteration} loss {(engine.sums[0] / engine.sums[1]).item():.4f}")


def parity(n):
    g = torch.Generator().manual_seed(9)
    x = torch.randint(0, 2, (n, 12), generator=g).float()
    return TensorDataset(x, (x[:, :3].sum(1) % 2).long())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(31)
    model = DDP(nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    data = parity(480)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=24, sampler=sampler)

    def process(engine, batch):
        x, y = batch
        model.train()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    trainer = Engine(process)
    trainer.on(Event.EPOCH_STARTED)(lambda e: sampler.set_epoch(e.epoch))
    attach_optimizer(trainer, optimizer, model, 1.0)
    attach_logging(trainer, rank)
    trainer.run(loader, 5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
