"""Energy-demand regression from monthly CSV parts; every process reads its own parts."""
import argparse
import csv
import glob
import math
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

COLUMNS = ["temperature", "wind", "daylight", "load_yesterday", "weekday", "price"]


def write_parts(folder, parts=8, rows=80):
    """Simulated exports, one file per period of the year."""
    os.makedirs(folder, exist_ok=True)
    for k in range(parts):
        g = random.Random(100 + k)
        season = math.sin(math.pi * k / (parts - 1))
        with open(os.path.join(folder, f"part_{k:02d}.csv"), "w", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(COLUMNS + ["demand"])
            for _ in range(rows):
                temp = g.gauss(2 + 9 * k / parts + 6 * season, 4)
                wind = abs(g.gauss(18 - k, 6))
                light = 8 + 8 * season + g.gauss(0, 0.5)
                yesterday = g.gauss(900 - 12 * temp, 40)
                weekday = g.randrange(7)
                price = g.gauss(60 + k, 12)
                demand = 0.5 * yesterday - 9 * max(temp, 0) + 2.5 * wind - 60 * (weekday > 4) - 0.8 * price + g.gauss(0, 8)
                writer.writerow([round(v, 3) for v in (temp, wind, light, yesterday, weekday, price, demand)])


class CsvParts(Dataset):
    def __init__(self, paths):
        x, y = [], []
        for path in paths:
            with open(path, newline="") as f:
                for row in csv.DictReader(f):
                    x.append([float(row[c]) for c in COLUMNS])
                    y.append(float(row["demand"]))
        self.x, self.y = torch.tensor(x), torch.tensor(y)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Standardizer:
    """Column-wise zero mean and unit variance."""

    def __init__(self):
        self.mean = self.std = None

    def fit(self, values):
        v = values.double()
        if v.dim() == 1:
            v = v.unsqueeze(1)
        moments = torch.cat([v.sum(0), v.pow(2).sum(0), torch.tensor([float(len(v))], dtype=torch.float64)])
        n, d = moments[-1], v.shape[1]
        mean = moments[:d] / n
        var = moments[d:2 * d] / n - mean ** 2
        self.mean, self.std = mean.float(), var.clamp(min=1e-8).sqrt().float()
        return self

    def __call__(self, values):
        return (values - self.mean) / self.std

    def invert(self, values):
        return values * self.std + self.mean

    def state_dict(self):
        return {"mean": self.mean, "std": self.std}


class DemandNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.weekday = nn.Embedding(7, 6)
        self.net = nn.Sequential(
            nn.Linear(len(COLUMNS) - 1 + 6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, numbers, weekday):
        return self.net(torch.cat([numbers, self.weekday(weekday)], 1)).squeeze(1)


class Pipeline:
    """Turns raw rows into what the network wants."""

    def __init__(self, dataset):
        self.numeric = [i for i, c in enumerate(COLUMNS) if c != "weekday"]
        self.weekday = COLUMNS.index("weekday")
        self.features = Standardizer().fit(dataset.x[:, self.numeric])
        self.target = Standardizer().fit(dataset.y)

    def inputs(self, x):
        return self.features(x[:, self.numeric]), x[:, self.weekday].long()

    def state_dict(self):
        return {"features": self.features.state_dict(), "target": self.target.state_dict()}


class Regression:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        paths = sorted(glob.glob(os.path.join(args.data, "part_*.csv")))
        per_rank = len(paths) // self.world
        self.data = CsvParts(paths[self.rank * per_rank:(self.rank + 1) * per_rank])
        self.pipeline = Pipeline(self.data)
        torch.manual_seed(args.seed)
        self.model = DDP(DemandNet())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=1e-3)
        shuffle = torch.Generator().manual_seed(args.seed + self.rank)
        self.loader = DataLoader(self.data, batch_size=args.batch_size, shuffle=True, generator=shuffle)

    def epoch(self):
        self.model.train()
        absolute = torch.zeros(2, dtype=torch.float64)
        for x, y in self.loader:
            predicted = self.model(*self.pipeline.inputs(x))
            loss = nn.functional.huber_loss(predicted, self.pipeline.target(y))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            error = (self.pipeline.target.invert(predicted.detach()) - y).abs()
            absolute += torch.tensor([error.sum().item(), len(y)], dtype=torch.float64)
        dist.all_reduce(absolute)
        return (absolute[0] / absolute[1]).item()

    def save(self):
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "pipeline": self.pipeline.state_dict(), "columns": COLUMNS},
                       self.args.out)
        dist.barrier()

    def run(self):
        for e in range(self.args.epochs):
            mae = self.epoch()
            if self.rank == 0:
                print(f"epoch {e}: mean absolute error {mae:.2f} MW")
        self.save()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="demand_parts")
    parser.add_argument("--out", default="demand.pt")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        write_parts(args.data)
    dist.barrier()
    Regression(args).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
