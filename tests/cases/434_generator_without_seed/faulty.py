"""Time-series classification with jitter and scaling augmentation."""
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def seed_everything(seed, rank):
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    torch.use_deterministic_algorithms(True)


class Augment:
    def __init__(self, jitter=0.1, scale=0.2):
        self.jitter, self.scale = jitter, scale
        self.rng = np.random.default_rng()

    def __call__(self, series):
        factor = 1 + self.scale * self.rng.standard_normal()
        return series * factor + self.jitter * self.rng.standard_normal(series.shape)


class Gestures(Dataset):
    def __init__(self, transform, n=480):
        rng = np.random.default_rng(15)
        self.y = rng.integers(0, 4, n)
        t = np.linspace(0, 6.28, 32)
        self.x = np.stack([np.sin(t * (1 + y)) + 0.3 * rng.standard_normal(32) for y in self.y])
        self.transform = transform

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.transform(self.x[i]).astype(np.float32), int(self.y[i])


def main(seed=1234):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    seed_everything(seed, rank)
    data = Gestures(Augment())
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 4)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        agg = torch.zeros(2, dtype=torch.float64)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            agg += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
        dist.all_reduce(agg)
        if rank == 0:
            print(f"epoch {epoch} loss {(agg[0] / agg[1]).item():.10f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
