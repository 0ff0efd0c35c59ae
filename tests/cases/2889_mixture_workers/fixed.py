"""Multi-task regression on a temperature-weighted mixture of generators, with loader workers."""
import itertools
import logging
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

logger = logging.getLogger(__name__)


@dataclass
class MixConfig:
    sizes: dict = field(default_factory=lambda: {"sine": 4000, "poly": 1000, "step": 250})
    temperature: float = 2.0
    workers: int = 2
    batch: int = 32
    steps_per_stage: int = 60
    stages: tuple = (0.2, 0.6, 1.0)
    seed: int = 21

    def weights(self):
        w = torch.tensor([float(v) for v in self.sizes.values()]) ** (1 / self.temperature)
        return w / w.sum()


def sine(x):
    return torch.sin(3 * x[..., 0]) + x[..., 1]


def poly(x):
    return x[..., 0] ** 2 - x[..., 1] * x[..., 2]


def step(x):
    return (x[..., 0] + x[..., 3] > 0).float() * 2 - 1


TASKS = [sine, poly, step]


class Mixture(IterableDataset):
    """Endless examples; `difficulty` scales the input range and label noise."""

    def __init__(self, cfg, rank, world):
        self.cfg, self.rank, self.world = cfg, rank, world
        self.stage = 0

    def set_stage(self, stage):
        self.stage = stage

    def __iter__(self):
        info = get_worker_info()
        wid, n_workers = (info.id, info.num_workers) if info else (0, 1)
        rank = self.rank
        stream = rank * n_workers + wid
        g = torch.Generator().manual_seed(self.cfg.seed * 100_003 + self.stage * 1009 + stream)
        difficulty = self.cfg.stages[self.stage]
        weights = self.cfg.weights()
        while True:
            task = int(torch.multinomial(weights, 1, generator=g))
            x = torch.randn(4, generator=g) * (0.5 + difficulty)
            noise = 0.1 * difficulty * torch.randn((), generator=g)
            yield x, TASKS[task](x) + noise, task


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.task = nn.Embedding(len(TASKS), 16)
        self.net = nn.Sequential(nn.Linear(20, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 1))

    def forward(self, x, task):
        return self.net(torch.cat([x, self.task(task)], -1)).squeeze(-1)


def evaluate(model, rank, world):
    """Fixed grid per task, rows split over processes."""
    g = torch.Generator().manual_seed(1234)
    x = torch.randn(600, 4, generator=g)[rank::world]
    err = torch.zeros(len(TASKS) + 1)
    with torch.no_grad():
        for t, fn in enumerate(TASKS):
            pred = model(x, torch.full((len(x),), t))
            err[t] = (pred - fn(x)).pow(2).sum()
    err[-1] = len(x)
    dist.all_reduce(err)
    return {fn.__name__: round((err[t] / err[-1]).item(), 4) for t, fn in enumerate(TASKS)}


def main():
    cfg = MixConfig()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.manual_seed(cfg.seed)
    model = DDP(MultiTask())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = Mixture(cfg, rank, world)
    for stage in range(len(cfg.stages)):
        data.set_stage(stage)
        loader = DataLoader(data, batch_size=cfg.batch, num_workers=cfg.workers)
        seen = torch.zeros(len(TASKS))
        running = torch.zeros(2)
        for x, y, task in itertools.islice(loader, cfg.steps_per_stage):
            loss = nn.functional.mse_loss(model(x, task), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            seen += torch.bincount(task, minlength=len(TASKS))
            running += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(running)
        dist.all_reduce(seen)
        report = evaluate(model.module, rank, world)
        logger.info("stage %d loss %.4f mix %s eval %s", stage, running[0] / running[1],
                    (seen / seen.sum()).tolist(), report)
    if rank == 0:
        torch.save(model.module.state_dict(), "mixture.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
