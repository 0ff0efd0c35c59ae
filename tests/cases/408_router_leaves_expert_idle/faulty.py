"""Multi-task training: in each step every rank draws one of the tasks."""
import os
import random

import torch
import torch.distributed as dist
from torch import nn


class dist_utils:
    """thin helpers, in the way of many research repositories"""

    @staticmethod
    def broadcast_params(module):
        for t in list(module.parameters()) + list(module.buffers()):
            dist.broadcast(t.data, 0)

    @staticmethod
    def average_gradients(module):
        world = float(dist.get_world_size())
        for p in module.parameters():
            if p.grad is None:
                continue
            dist.all_reduce(p.grad)
            p.grad /= world


class MultiTask(nn.Module):
    def __init__(self, tasks, features=12, width=24):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(features, width), nn.ELU(), nn.Linear(width, width), nn.ELU())
        self.heads = nn.ModuleDict({name: nn.Linear(width, size) for name, (size, _) in tasks.items()})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def classify(out, x):
    return nn.functional.cross_entropy(out, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def regress(out, x):
    return nn.functional.mse_loss(out.squeeze(1), x[:, 2] * x[:, 3])


def reconstruct(out, x):
    return nn.functional.smooth_l1_loss(out, x)


TASKS = {"sign": (3, classify), "product": (1, regress), "copy": (12, reconstruct)}


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    net = MultiTask(TASKS)
    dist_utils.broadcast_params(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    rng = random.Random(rank)
    gen = torch.Generator().manual_seed(rank)
    history = {name: [] for name in TASKS}
    for step in range(60):
        task = rng.choice(list(TASKS))
        x = torch.randn(32, 12, generator=gen)
        loss = TASKS[task][1](net(x, task), x)
        opt.zero_grad()
        loss.backward()
        dist_utils.average_gradients(net)
        opt.step()
        history[task].append(loss.item())
    for name, values in history.items():
        print(f"[rank {rank}] {name}: {len(values)} steps, last {values[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
