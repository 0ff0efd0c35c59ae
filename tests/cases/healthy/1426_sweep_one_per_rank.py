"""Random search: the trials are dealt out to the processes, rank 0 writes the league table."""
import json
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def build(trial):
    torch.manual_seed(trial["seed"])
    layers, width = [], 10
    for _ in range(trial["depth"]):
        layers += [nn.Linear(width, trial["width"]), nn.ReLU()]
        width = trial["width"]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def data():
    g = torch.Generator().manual_seed(99)
    x = torch.randn(900, 10, generator=g)
    y = torch.stack([x[:, :3].sum(1), x[:, 3:6].sum(1), x[:, 6:9].sum(1)], 1).argmax(1)
    return (x[:600], y[:600]), (x[600:], y[600:])


def fit(trial, train, valid):
    model = build(trial)
    opt = getattr(torch.optim, trial["opt"])(model.parameters(), lr=trial["lr"])
    order = torch.Generator().manual_seed(trial["seed"])
    x, y = train
    for _ in range(trial["epochs"]):
        model.train()
        for idx in torch.randperm(len(x), generator=order).split(trial["batch"]):
            opt.zero_grad()
            F.cross_entropy(model(x[idx]), y[idx]).backward()
            opt.step()
    model.eval()
    with torch.no_grad():
        return (model(valid[0]).argmax(1) == valid[1]).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dice = random.Random(2024)
    trials = [{"seed": i, "lr": 10 ** dice.uniform(-3.5, -1.5), "width": dice.choice([8, 16, 32]), "depth": dice.choice([1, 2, 3]),
               "opt": dice.choice(["Adam", "SGD"]), "batch": dice.choice([20, 50]), "epochs": dice.choice([4, 7])} for i in range(9)]
    train, valid = data()
    rows = [(fit(t, train, valid), t) for t in trials[rank::world]]
    table = [None] * world if rank == 0 else None
    dist.gather_object(rows, table, dst=0)
    if rank == 0:
        league = sorted((r for part in table for r in part), key=lambda r: -r[0])
        with open("league.json", "w") as f:
            json.dump(league, f, indent=1)
        print("best", round(league[0][0], 3), league[0][1])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
