"""Learns the acceleration of bodies from noisy orbits; the script starts its own workers."""
import os
import socket
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class RunConfig:
    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))
    world: int = 2
    orbits: int = 768
    batch: int = 32
    epochs: int = 7
    lr: float = 3e-3
    seed: int = 10


def orbits(n, seed):
    g = torch.Generator().manual_seed(seed)
    place = 0.5 + torch.rand(n, 3, generator=g)
    place = place * torch.where(torch.rand(n, 3, generator=g) < 0.5, -1.0, 1.0)
    mass = 0.5 + torch.rand(n, 1, generator=g)
    pull = -mass * place / place.norm(dim=1, keepdim=True) ** 3
    return TensorDataset(torch.cat([place, mass], 1), pull + 0.02 * torch.randn(n, 3, generator=g))


def loaders(cfg):
    train, val = orbits(cfg.orbits, 1), orbits(128, 2)
    sampler = DistributedSampler(train, num_replicas=cfg.world, rank=cfg.rank, seed=cfg.seed, drop_last=True)
    mine = torch.utils.data.Subset(val, range(dist.get_rank(), len(val), dist.get_world_size()))
    return sampler, DataLoader(train, cfg.batch, sampler=sampler), DataLoader(mine, cfg.batch)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.body(x)


def network(width=96):
    return nn.Sequential(nn.Linear(4, width), Residual(width), Residual(width), nn.LayerNorm(width), nn.Linear(width, 3))


class Fit:
    def __init__(self, cfg):
        self.cfg = cfg
        self.sampler, self.train, self.val = loaders(cfg)
        torch.manual_seed(cfg.seed)
        self.model = DDP(network())
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        self.plan = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, cfg.epochs * len(self.train))

    def one_epoch(self, number):
        self.sampler.set_epoch(number)
        total = torch.zeros(1)
        for state, pull in self.train:
            loss = nn.functional.mse_loss(self.model(state), pull)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.plan.step()
            total += loss.detach()
        return total / len(self.train)

    def check(self):
        self.model.eval()
        error = torch.zeros(2)
        with torch.no_grad():
            for state, pull in self.val:
                error += torch.tensor([(self.model.module(state) - pull).norm(dim=1).sum().item(), len(state)])
        dist.all_reduce(error)
        self.model.train()
        return (error[0] / error[1]).item()


def worker(index, world, port):
    os.environ.update(RANK=str(index), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cfg = RunConfig(world=world)
    fit = Fit(cfg)
    for number in range(cfg.epochs):
        loss = fit.one_epoch(number)
        dist.all_reduce(loss)
        error = fit.check()
        if index == 0:
            print(f"epoch {number}: loss {loss.item() / world:.4f}, error {error:.4f}", flush=True)
    if index == 0:
        torch.save(fit.model.module.state_dict(), "pull.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = str(s.getsockname()[1])
    mp.spawn(worker, args=(2, free), nprocs=2)
