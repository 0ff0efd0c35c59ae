"""Prototypical network on synthetic glyphs. All ranks draw the *same* episode (one seed) and each works on its own slice of the queries."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Embed(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.out = nn.Linear(64, dim)

    def forward(self, x):
        return self.out(self.body(x))


class Episodes:
    """Same generator on every rank: episode i is the same everywhere."""

    def __init__(self, n_way, n_shot, n_query, seed):
        self.way, self.shot, self.query = n_way, n_shot, n_query
        self.g = torch.Generator().manual_seed(seed)
        self.glyphs = torch.randn(40, 1, 12, 12, generator=self.g)

    def draw(self):
        cls = torch.randperm(len(self.glyphs), generator=self.g)[: self.way]
        n = self.shot + self.query
        x = self.glyphs[cls][:, None] + 0.6 * torch.randn(self.way, n, 1, 12, 12, generator=self.g)
        support, query = x[:, : self.shot], x[:, self.shot:]
        labels = torch.arange(self.way)[:, None].expand(-1, self.query)
        return support.reshape(-1, 1, 12, 12), query.reshape(-1, 1, 12, 12), labels.reshape(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--episodes", type=int, default=60)
    ap.add_argument("--lr", type=float, default=2e-3)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = DDP(Embed())
    opt = torch.optim.Adam(net.parameters(), lr=a.lr)
    ep = Episodes(5, 3, 8, seed=1234)
    running = None
    for i in range(a.episodes):
        support, query, y = ep.draw()
        perm = torch.randperm(len(query), generator=ep.g)          # common permutation, then every world-th query
        mine = perm[rank::world]
        z = net(torch.cat([support, query[mine]]))
        proto = z[: len(support)].view(5, 3, -1).mean(1)
        logits = -torch.cdist(z[len(support):], proto) ** 2
        loss = F.cross_entropy(logits, y[mine])
        opt.zero_grad()
        loss.backward()
        opt.step()
        stat = torch.stack([loss.detach(), (logits.argmax(1) == y[mine]).float().mean()])
        dist.all_reduce(stat)
        stat /= world
        running = stat if running is None else 0.9 * running + 0.1 * stat
        if rank == 0 and i % 20 == 19:
            print(f"episode {i + 1}: loss {running[0]:.3f} acc {running[1]:.3f}", flush=True)
    if rank == 0:
        torch.save(net.module.state_dict(), os.path.join(os.environ.get("TMPDIR", "/tmp"), "proto_751.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
