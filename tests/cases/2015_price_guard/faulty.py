"""House prices from tabular data; a guard lowers the learning rate when the loss jumps."""
import csv
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SETTINGS = {
    "rows": 2048, "file": "houses.csv", "batch": 32, "epochs": 8, "width": 96, "seed": 13,
    "optimizer": {"lr": 0.02, "momentum": 0.9},
    "guard": {"jump": 2.2, "shrink": 0.8, "memory": 0.9},
}
COLUMNS = ("area", "rooms", "age", "distance", "floor")


def write_table(path, rows, seed):
    """Rare villas cost far more than their columns tell."""
    rng = random.Random(seed)
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        out.writerow(COLUMNS + ("price",))
        for _ in range(rows):
            x = [rng.gauss(0, 1) for _ in COLUMNS]
            price = 1.5 * x[0] + 0.5 * x[1] * x[0] - 0.4 * x[2] - abs(x[3]) + rng.gauss(0, 0.3)
            if rng.random() < 0.02:
                price += rng.uniform(4, 8)
            out.writerow([f"{v:.4f}" for v in x + [price]])


def read_table(path):
    with open(path) as f:
        rows = [[float(r[c]) for c in COLUMNS + ("price",)] for r in csv.DictReader(f)]
    table = torch.tensor(rows)
    return table[:, :-1], table[:, -1]


class SpikeGuard:
    def __init__(self, optimizer, jump, shrink, memory):
        self.optimizer, self.jump, self.shrink, self.memory = optimizer, jump, shrink, memory
        self.level, self.events = None, 0

    def observe(self, loss):
        value = loss.detach().clone()
        value = value.item()
        if self.level is not None and value > self.jump * self.level:
            self.events += 1
            for group in self.optimizer.param_groups:
                group["lr"] = max(group["lr"] * self.shrink, 1e-3)
        self.level = value if self.level is None else self.memory * self.level + (1 - self.memory) * value


def shard(rows, batch, seed, epoch, rank, world):
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch))
    steps = rows // (batch * world)
    return order[: steps * batch * world].view(steps, world, batch)[:, rank]


def evaluate(model, x, y, rank, world):
    model.eval()
    with torch.no_grad():
        error = (model.module(x[rank::world]).squeeze(1) - y[rank::world]).abs()
    pair = torch.tensor([error.sum().item(), float(len(error))])
    dist.all_reduce(pair)
    model.train()
    return (pair[0] / pair[1]).item()


def main(settings):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_table(settings["file"], settings["rows"], settings["seed"])
    dist.barrier()
    x, y = read_table(settings["file"])
    held = 256
    torch.manual_seed(settings["seed"])
    w = settings["width"]
    model = DDP(nn.Sequential(nn.Linear(len(COLUMNS), w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 1)))
    opt = torch.optim.SGD(model.parameters(), **settings["optimizer"])
    guard = SpikeGuard(opt, **settings["guard"])

    for epoch in range(settings["epochs"]):
        total, count = torch.zeros(1), 0
        for rows in shard(len(x) - held, settings["batch"], settings["seed"], epoch, rank, world):
            loss = nn.functional.mse_loss(model(x[held + rows]).squeeze(1), y[held + rows])
            opt.zero_grad()
            loss.backward()
            guard.observe(loss)
            opt.step()
            total, count = total + loss.detach(), count + 1
        dist.all_reduce(total)
        error = evaluate(model, x[:held], y[:held], rank, world)
        if rank == 0:
            print(f"{epoch:2d}  mse {total.item() / count / world:.3f}  held-out error {error:.3f}  lr {opt.param_groups[0]['lr']:.5f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.splitext(settings["file"])[0] + ".pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(SETTINGS)
