"""Metric learning with class-balanced batches (P classes x K samples) on every rank."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


class PKBatchSampler:
    """P random classes with K random samples each; batches are dealt round robin to the ranks."""

    def __init__(self, labels, p, k, batches, rank, world, seed=0):
        self.by_class = [torch.nonzero(labels == c).flatten() for c in range(int(labels.max()) + 1)]
        self.p, self.k, self.batches = p, k, batches
        self.rank, self.world = rank, world
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.batches

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        for b in range(self.batches * self.world):
            classes = torch.randperm(len(self.by_class), generator=g)[:self.p]
            rows = []
            for c in classes.tolist():
                pool = self.by_class[c]
                rows.append(pool[torch.randperm(len(pool), generator=g)[:self.k]])
            if b % self.world == self.rank:
                yield torch.cat(rows).tolist()


def blobs(n=600, classes=12, dim=20):
    g = torch.Generator().manual_seed(61)
    centers = 2 * torch.randn(classes, dim, generator=g)
    y = torch.randint(0, classes, (n,), generator=g)
    return TensorDataset(centers[y] + torch.randn(n, dim, generator=g), y)


def triplet_hard(emb, y, margin=0.3):
    d = torch.cdist(emb, emb)
    same = y[:, None] == y[None, :]
    pos = d.masked_fill(~same, 0.0).max(1).values
    neg = d.masked_fill(same, 1e6).min(1).values
    return F.relu(pos - neg + margin).mean()


class Trainer:
    def __init__(self, model, optimizer, loader, rank):
        self.model, self.optimizer, self.loader, self.rank = model, optimizer, loader, rank

    def on_epoch_start(self, epoch):
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(epoch)
        elif hasattr(self.loader.batch_sampler, "set_epoch"):
            self.loader.batch_sampler.set_epoch(epoch)

    def run_epoch(self, epoch):
        self.on_epoch_start(epoch)
        total = torch.zeros(1)
        for x, y in self.loader:
            loss = triplet_hard(F.normalize(self.model(x), dim=1), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        return total.item() / len(self.loader) / dist.get_world_size()

    def fit(self, epochs):
        for epoch in range(epochs):
            loss = self.run_epoch(epoch)
            if self.rank == 0:
                print(f"epoch {epoch}: triplet loss {loss:.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("-P", type=int, default=6)
    ap.add_argument("-K", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(int(os.environ.get("SEED", "5")))
    data = blobs()
    batch_sampler = PKBatchSampler(data.tensors[1], args.P, args.K, batches=12, rank=rank, world=world)
    loader = DataLoader(data, batch_sampler=batch_sampler)
    model = DDP(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    Trainer(model, optimizer, loader, rank).fit(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
