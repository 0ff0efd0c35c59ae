"""Local SGD (periodic model averaging) on a spiral classification task."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn


def spirals(n=384, arms=3):
    g = torch.Generator().manual_seed(30)
    label = torch.arange(n) % arms
    t = torch.rand(n, generator=g)
    angle = 4 * t + 2 * math.pi * label / arms + 0.1 * torch.randn(n, generator=g)
    return torch.stack([t * angle.cos(), t * angle.sin()], 1) * 3, label


class LocalSGD:
    def __init__(self, model, optimizer, period):
        self.model, self.optimizer, self.period = model, optimizer, period
        for t in list(model.parameters()) + list(model.buffers()):
            dist.broadcast(t.data, 0)

    def step(self, t):
        self.optimizer.step()
        if (t + 1) % self.period == 0:
            self.average()

    @torch.no_grad()
    def average(self):
        world = dist.get_world_size()
        for p in self.model.parameters():
            dist.all_reduce(p)
            p /= world


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--period", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = spirals()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = LocalSGD(model, optimizer, args.period)

    global_step = 0
    for epoch in range(args.epochs):
        perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        shard = perm[rank::world]
        log = torch.zeros(3)
        for i, idx in enumerate(shard.split(args.batch_size)):
            out = model(x[idx])
            loss = nn.functional.cross_entropy(out, y[idx])
            optimizer.zero_grad()
            loss.backward()
            trainer.step(i)
            global_step += 1
            log += torch.tensor([loss.item() * len(idx), (out.argmax(1) == y[idx]).sum().item(), len(idx)])
        dist.all_reduce(log)
        if rank == 0:
            print(f"epoch {epoch} step {global_step} loss {log[0] / log[2]:.3f} acc {log[1] / log[2]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
