"""Progressive freezing (as in FreezeOut): early layers stop training first.

The schedule is part of the configuration: fraction of training -> what is frozen from there on.
"""
import json
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CONFIG = json.loads("""
{
  "steps": 45, "batch": 16, "lr": 0.05,
  "freeze": [[0.33, "stem"], [0.66, "body"]]
}
""")


def build():
    net = nn.Sequential()
    net.add_module("stem", nn.Sequential(nn.Conv1d(2, 8, 5, padding=2), nn.ReLU()))
    net.add_module("body", nn.Sequential(nn.Conv1d(8, 8, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten()))
    net.add_module("head", nn.Linear(32, 3))
    return net


class FreezeSchedule:
    def __init__(self, net, table, total):
        self.net = net
        self.todo = sorted((int(frac * total), name) for frac, name in table)

    def advance(self, step):
        """True if something was frozen"""
        changed = False
        while self.todo and step >= self.todo[0][0]:
            _, name = self.todo.pop(0)
            for p in self.net.get_submodule(name).parameters():
                p.requires_grad = False
                p.grad = None
            changed = True
        return changed


def signal_batch(rng, n):
    kind = rng.integers(0, 3, n)
    t = np.linspace(0, 1, 40)
    phase = rng.random(n)[:, None]
    freq = (kind + 1)[:, None] * 2
    x = np.stack([np.sin(2 * np.pi * (freq * t + phase)), np.cos(2 * np.pi * (freq * t + phase))], 1)
    x += 0.4 * rng.standard_normal(x.shape)
    return torch.from_numpy(x).float(), torch.from_numpy(kind)


def main(cfg):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = build()
    model = DDP(net)
    schedule = FreezeSchedule(net, cfg["freeze"], cfg["steps"])
    optimizer = torch.optim.SGD(net.parameters(), lr=cfg["lr"], momentum=0.9)
    rng = np.random.default_rng([5, rank])
    for step in range(cfg["steps"]):
        if schedule.advance(step):
            model = DDP(net)
        x, y = signal_batch(rng, cfg["batch"])
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 15 == 0:
            left = sum(p.numel() for p in net.parameters() if p.requires_grad)
            print(f"step {step} trainable {left}", flush=True)
    dist.destroy_process_group()


main(CONFIG)
