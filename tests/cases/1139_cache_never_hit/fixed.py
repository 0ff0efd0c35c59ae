"""Set encoder with pairwise distances as attention bias."""
import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def distance_bias(points):
    diff = points[:, :, None] - points[:, None]
    return -diff.square().sum(-1)


@functools.lru_cache(maxsize=None)
def off_diagonal(n):
    return ~torch.eye(n, dtype=torch.bool)


class SetEncoder(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.inp = nn.Linear(2, dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.temperature = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(dim, 1)

    def forward(self, points):
        h = self.inp(points)
        bias = distance_bias(points).masked_fill(~off_diagonal(points.shape[1]), 0.0)
        att = self.q(h) @ self.k(h).transpose(1, 2) / h.shape[-1] ** 0.5 + self.temperature * bias
        return self.out(F.gelu(h + att.softmax(-1) @ self.v(h)).mean(1)).squeeze(1)


def sets(steps, batch, size, rank, world):
    """Point sets with their mean nearest-neighbour distance; one stream per process."""
    g = torch.Generator().manual_seed(500 + rank)
    for _ in range(steps):
        points = torch.rand(batch // world, size, 2, generator=g) * (0.5 + torch.rand(batch // world, 1, 1, generator=g))
        d = torch.cdist(points, points) + 10 * torch.eye(size)
        yield points, 10 * d.amin(-1).mean(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=150)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--size", type=int, default=96)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DistributedDataParallel(SetEncoder())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    shown = 0.0
    for step, (points, target) in enumerate(sets(args.steps, args.batch, args.size, rank, world)):
        loss = F.smooth_l1_loss(model(points), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown += loss.item()
        if step % 25 == 24:
            if rank == 0:
                print(f"step {step + 1}: {shown / 25:.4f}", flush=True)
            shown = 0.0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
