"""Click-through model on a stream of events; stream, model and loop are built from one config."""
import math
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

CONFIG = {
    "stream": {"events": 1600, "seed": 3},
    "model": {"users": 50, "items": 80, "dim": 8},
    "train": {"epochs": 3, "batch": 40, "lr": 0.02},
}


class dist_info:
    @staticmethod
    def ready():
        return dist.is_available() and dist.is_initialized()

    @classmethod
    def rank(cls):
        return dist.get_rank() if cls.ready() else 0

    @classmethod
    def world(cls):
        return dist.get_world_size() if cls.ready() else 1


class EventStream(IterableDataset):
    def __init__(self, events, seed, users, items):
        self.events, self.seed, self.users, self.items = events, seed, users, items
        self.rank, self.world = dist_info.rank(), dist_info.world()
        self.epoch = 0

    def raw(self):
        rng = random.Random(self.seed + 977 * self.epoch)
        for _ in range(self.events):
            u, i = rng.randrange(self.users), rng.randrange(self.items)
            p = 1 / (1 + math.exp(-2 * math.sin(u * 0.7 + i * 0.3)))
            yield u, i, float(rng.random() < p)

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        mine, every = self.rank * workers + worker, self.world * workers
        for k, event in enumerate(self.raw()):
            if k % every == mine:
                yield event


class Factor(nn.Module):
    def __init__(self, users, items, dim):
        super().__init__()
        self.u = nn.Embedding(users, dim)
        self.i = nn.Embedding(items, dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i):
        return self.mlp(torch.cat([self.u(u), self.i(i)], 1)).squeeze(1)


class Recipe:
    def __init__(self, cfg):
        self.cfg = cfg
        m, s = cfg["model"], cfg["stream"]
        self.stream = EventStream(s["events"], s["seed"], m["users"], m["items"])
        self.net = Factor(**m)

    def setup(self):
        self.model = DDP(self.net)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=self.cfg["train"]["lr"])

    def run(self):
        t = self.cfg["train"]
        for self.stream.epoch in range(t["epochs"]):
            stats = torch.zeros(2)
            for u, i, click in DataLoader(self.stream, batch_size=t["batch"]):
                click = click.float()
                loss = nn.functional.binary_cross_entropy_with_logits(self.model(u, i), click)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                stats += torch.tensor([loss.item() * len(u), len(u)])
            dist.all_reduce(stats)
            if dist_info.rank() == 0:
                print(f"epoch {self.stream.epoch}: log loss {stats[0] / stats[1]:.4f}")


def main():
    torch.manual_seed(8)
    recipe = Recipe(CONFIG)
    dist.init_process_group("gloo")
    recipe.setup()
    recipe.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
