"""Prioritised sampling for regression on hard examples; numbers are reduced to rank 0, which reports."""
import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclasses.dataclass
class Cfg:
    steps: int = 120
    batch: int = 24
    lr: float = 2e-3
    alpha: float = 0.6
    report: int = 30


class Replay:
    def __init__(self, x, y, seed):
        self.x, self.y = x, y
        self.priority = [torch.tensor(1.0)] * len(x)
        self.rng = torch.Generator().manual_seed(seed)

    def sample(self, n, alpha):
        with torch.no_grad():
            p = torch.stack(self.priority) ** alpha
        idx = torch.multinomial(p, n, replacement=True, generator=self.rng)
        return idx, self.x[idx], self.y[idx]

    def update(self, idx, errors):
        for i, e in zip(idx.tolist(), errors):
            self.priority[i] = e + 1e-3


def shard(rank, world, n=480):
    g = torch.Generator().manual_seed(83)
    x = torch.randn(n, 6, generator=g)
    y = x[:, 0] * x[:, 1] + (x[:, 2] > 1).float() * 3
    return x[rank::world], y[rank::world]


def main(cfg):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    memory = Replay(*shard(rank, world), seed=10 + rank)
    window = torch.zeros(2)
    for step in range(1, cfg.steps + 1):
        idx, x, y = memory.sample(cfg.batch, cfg.alpha)
        err = (model(x).squeeze(1) - y).abs()
        loss = err.mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        memory.update(idx, err.detach())
        window += torch.tensor([loss.item(), 1.0])
        if step % cfg.report == 0:
            dist.reduce(window, dst=0)
            if rank == 0:
                print(f"step {step}: error {window[0] / window[1]:.4f}")
            window = torch.zeros(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Cfg())
