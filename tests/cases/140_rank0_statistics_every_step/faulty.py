"""Learning an orthogonal map, with a record of the layers' spectra kept by the main process."""
import csv
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH = 256


class SpectrumLog:
    """Largest and smallest singular value of every weight matrix, one line each."""

    def __init__(self, path):
        self.path = path

    @torch.no_grad()
    def write(self, step, net):
        with open(self.path, "a", newline="") as f:
            out = csv.writer(f)
            for name, p in net.named_parameters():
                if p.dim() == 2:
                    s = torch.linalg.svdvals(p)
                    out.writerow([step, name, round(s[0].item(), 5), round(s[-1].item(), 5)])


def teacher(dim=24):
    q, _ = torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(2)))
    return q


def examples(q, rank, batch):
    gen = torch.Generator().manual_seed(10 + rank)
    while True:
        x = torch.randn(batch, len(q), generator=gen)
        yield x, x @ q


def student(dim=24):
    return nn.Sequential(nn.Linear(dim, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, dim))


class Rounds:
    def __init__(self, log):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = DDP(student())
        self.opt = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.data = examples(teacher(), self.rank, batch=32)
        self.log, self.steps = log, 0

    def step(self):
        x, y = next(self.data)
        loss = nn.functional.mse_loss(self.model(x), y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.steps += 1
        if self.rank == 0:
            self.log.write(self.steps, self.model.module)
        return loss.detach()

    def run(self, rounds, steps):
        for r in range(rounds):
            total = sum(self.step() for _ in range(steps))
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"round {r}: loss {total.item() / steps / self.world:.4f}", flush=True)


def main():
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    Rounds(SpectrumLog("spectra.csv")).run(rounds=5, steps=25)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
