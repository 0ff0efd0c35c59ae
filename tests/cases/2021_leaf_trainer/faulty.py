"""Leaf-shape classifier: small convnet, a Trainer that owns both loops."""
import math
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

SPECIES = 6


class Leaves(Dataset):
    """Images are listed folder by folder, one folder a species."""

    def __init__(self, per_species, seed):
        gen = np.random.default_rng(seed)
        self.images, self.labels = [], []
        yy, xx = np.mgrid[-1:1:20j, -1:1:20j]
        for species, count in enumerate(per_species):
            for _ in range(count):
                angle = np.arctan2(yy, xx) + gen.uniform(0, 0.4)
                edge = 0.55 + 0.25 * np.cos((species + 2) * angle)
                leaf = (np.hypot(xx, yy) < edge) + gen.normal(0, 0.75, xx.shape)
                self.images.append(torch.tensor(leaf, dtype=torch.float32)[None])
                self.labels.append(species)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class RankSampler(Sampler):
    """Deals indices out over the ranks; `even` rounds up so that all ranks see the same number of full batches."""

    def __init__(self, size, batch, shuffle=False, even=True, seed=0):
        self.size, self.shuffle, self.seed, self.epoch = size, shuffle, seed, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        block = batch * self.world
        self.total = math.ceil(size / block) * block if even else size

    def __iter__(self):
        order = list(range(self.size))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        while len(order) < self.total:
            order += order[: self.total - len(order)]
        return iter(order[self.rank : self.total : self.world])

    def __len__(self):
        return len(range(self.rank, self.total, self.world))


class LeafNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(5))
        self.out = nn.Linear(32 * 25, SPECIES)

    def forward(self, x):
        return self.out(self.body(x).flatten(1))


class Trainer:
    def __init__(self, train_set, test_set, batch=24, lr=2e-3):
        self.net = LeafNet()
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.sampler = RankSampler(len(train_set), batch, shuffle=True)
        self.train_loader = DataLoader(train_set, batch, sampler=self.sampler)
        self.test_loader = DataLoader(test_set, batch, sampler=RankSampler(len(test_set), batch))

    def train_epoch(self, epoch):
        self.sampler.epoch = epoch
        self.model.train()
        total = torch.zeros(2)
        for images, labels in self.train_loader:
            loss = F.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    @torch.no_grad()
    def test(self):
        self.net.eval()
        right = torch.zeros(2)
        for images, labels in self.test_loader:
            hits = (self.net(images).argmax(1) == labels).sum().item()
            right += torch.tensor([hits, len(labels)])
        dist.all_reduce(right)
        return (right[0] / right[1]).item()

    def fit(self, epochs):
        for epoch in range(epochs):
            loss = self.train_epoch(epoch)
            accuracy = self.test()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}  train loss {loss:.4f}  test accuracy {accuracy:.4f}", flush=True)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(int(os.environ.get("SEED", 5)))
    train_set = Leaves([80] * SPECIES, seed=1)
    test_set = Leaves([31, 24, 40, 36, 28, 38], seed=2)
    Trainer(train_set, test_set).fit(epochs=4)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
