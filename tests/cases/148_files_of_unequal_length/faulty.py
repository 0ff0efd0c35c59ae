"""Power consumption from weather; one CSV file per household, read as a stream."""
import csv
import math
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


def write_households(folder, households=6):
    os.makedirs(folder, exist_ok=True)
    rng = random.Random(15)
    for k in range(households):
        rows = 300 + 90 * k
        with open(os.path.join(folder, f"house_{k}.csv"), "w", newline="") as f:
            out = csv.writer(f)
            for _ in range(rows):
                temp, hour, wind = rng.uniform(-10, 25), rng.uniform(0, 24), rng.random()
                load = 3 - 0.1 * temp + math.sin(hour / 24 * 2 * math.pi) + 0.5 * wind + rng.gauss(0, 0.1)
                out.writerow([f"{v:.4f}" for v in (temp / 20, math.sin(hour / 3.82), math.cos(hour / 3.82), wind, load)])


class Households(IterableDataset):
    """All rows of the given files, one after the other; the files come in another order in each pass."""

    def __init__(self, files):
        self.files, self.passes = list(files), 0

    def __iter__(self):
        order = random.Random(self.passes).sample(self.files, len(self.files))
        self.passes += 1
        for path in order:
            with open(path, newline="") as f:
                for row in csv.reader(f):
                    values = torch.tensor([float(v) for v in row])
                    yield values[:4], values[4:]


def one_pass(model, opt, loader):
    squares, rows = 0.0, 0
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        squares, rows = squares + loss.item() * len(x), rows + len(x)
    return torch.tensor([squares, rows])


def main(folder="households", passes=3):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        write_households(folder)
    dist.barrier()
    files = [os.path.join(folder, name) for name in sorted(os.listdir(folder))]

    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(Households(files[rank::world]), batch_size=30)
    for k in range(passes):
        total = one_pass(model, opt, loader)
        dist.all_reduce(total)
        if rank == 0:
            print(f"pass {k}: {int(total[1])} rows, mse {(total[0] / total[1]).item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
