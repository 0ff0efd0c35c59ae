"""Sums of sequences with a GRU, with a run folder per job; weights are averaged after every plain SGD step."""
import json
import os
import time
import uuid

import torch
import torch.distributed as dist
from torch import nn


class RunLog:
    def __init__(self, root, settings):
        rank = dist.get_rank()
        name = time.strftime("%Y%m%d-%H%M%S-") + uuid.uuid4().hex[:6]
        shared = [name]
        dist.broadcast_object_list(shared, src=0)
        self.folder = os.path.join(root, shared[0])
        self.active = rank == 0
        if self.active:
            os.makedirs(self.folder, exist_ok=True)
            with open(os.path.join(self.folder, "settings.json"), "w") as f:
                json.dump(settings, f)
        self.console = rank == 0

    def row(self, **values):
        text = "\t".join(f"{k}={v:.4f}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
        if self.active:
            with open(os.path.join(self.folder, "log.tsv"), "a") as f:
                f.write(text + "\n")
        if self.console:
            print(text, flush=True)


class Adder(nn.Module):
    """Adds up a short sequence."""

    def __init__(self, hidden=24):
        super().__init__()
        self.cell = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        _, h = self.cell(x)
        return self.out(h[-1]).squeeze(1)


def sequences(gen, n, length=6):
    values = 2 * torch.rand(n, length, generator=gen) - 1
    return values.unsqueeze(2), values.sum(1)


@torch.no_grad()
def average_weights(net, world):
    """Plain SGD: the mean of the stepped weights is the step along the mean gradient."""
    for p in net.parameters():
        dist.all_reduce(p)
        p.div_(world)


def train(net, opt, gen, steps, batch, world):
    total = torch.zeros(())
    for _ in range(steps):
        x, y = sequences(gen, batch)
        loss = nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        average_weights(net, world)
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / steps / world


def main():
    settings = {"rounds": 6, "steps": 30, "batch": 32, "lr": 0.05, "seed": 3}
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log = RunLog("runs", settings)
    torch.manual_seed(settings["seed"])
    net = Adder()
    opt = torch.optim.SGD(net.parameters(), lr=settings["lr"])
    gen = torch.Generator().manual_seed(100 * settings["seed"] + rank)
    for r in range(settings["rounds"]):
        loss = train(net, opt, gen, settings["steps"], settings["batch"], world)
        log.row(round=r, loss=loss)
    if rank == 0:
        torch.save(net.state_dict(), os.path.join(log.folder, "adder.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
