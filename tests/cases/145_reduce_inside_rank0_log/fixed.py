"""Colour names from RGB values; the trainer has a logger object."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

NAMED = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1], [0, 0, 0], [1, 1, 1]]).float()


def colours(gen, n):
    name = torch.randint(0, len(NAMED), (n,), generator=gen)
    return (NAMED[name] + 0.25 * torch.randn(n, 3, generator=gen)).clamp(0, 1), name


def mean_over_ranks(value):
    value = value.clone()
    dist.all_reduce(value)
    return (value / dist.get_world_size()).item()


class Logger:
    def __init__(self, path, rank):
        self.path, self.rank, self.start = path, rank, time.time()

    def epoch(self, number, loss):
        loss = mean_over_ranks(loss)
        if self.rank == 0:
            line = f"epoch {number}: loss {loss:.4f}"
            print(line, flush=True)
            with open(self.path, "a") as f:
                f.write(f"{time.time() - self.start:.2f}\t{line}\n")


class Trainer:
    def __init__(self, model, opt, logger, gen):
        self.model, self.opt, self.logger, self.gen = model, opt, logger, gen

    def train_epoch(self, steps, batch):
        losses = []
        for _ in range(steps):
            rgb, name = colours(self.gen, batch)
            loss = nn.functional.cross_entropy(self.model(rgb), name)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def fit(self, epochs, steps=25, batch=32):
        for number in range(epochs):
            self.logger.epoch(number, self.train_epoch(steps, batch))
            dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, len(NAMED))))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    Trainer(model, opt, Logger("log.tsv", rank), torch.Generator().manual_seed(80 + rank)).fit(epochs=5)
    if rank == 0:
        torch.save(model.module.state_dict(), "colours.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
