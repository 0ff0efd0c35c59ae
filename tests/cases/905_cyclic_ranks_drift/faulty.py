"""Step-based training of a small regression net from an endless, resumable stream of batches."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Catalogue(Dataset):
    """101 light curves (sampled sine waves) and their frequency."""

    def __init__(self, n=101, length=32):
        g = torch.Generator().manual_seed(17)
        self.freq = 0.2 + 0.8 * torch.rand(n, 1, generator=g)
        t = torch.arange(length).float()
        self.curves = torch.sin(self.freq * t + 6.28 * torch.rand(n, 1, generator=g))
        self.curves += 0.05 * torch.randn(n, length, generator=g)

    def __len__(self):
        return len(self.freq)

    def __getitem__(self, i):
        return self.curves[i], self.freq[i]


class CyclicBatchSampler:
    """Goes round the data set for ever; every pass has its own permutation."""

    def __init__(self, total, micro_batch_size, rank, world, seed=0):
        self.total, self.mbs = total, micro_batch_size
        self.rank, self.world, self.seed = rank, world, seed
        self.passes = 0

    def __iter__(self):
        while True:
            g = torch.Generator().manual_seed(self.seed + self.passes)
            order = torch.randperm(self.total, generator=g)
            mine = order[self.rank::self.world].tolist()
            batch = []
            for i in mine:
                batch.append(i)
                if len(batch) == self.mbs:
                    yield batch
                    batch = []
            self.passes += 1


class Trainer:
    def __init__(self, model, loader, lr, rank):
        self.model, self.rank = model, rank
        self.stream = iter(loader)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.loss = nn.SmoothL1Loss()

    def train_step(self):
        curves, freq = next(self.stream)
        loss = self.loss(self.model(curves), freq)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def fit(self, steps, log_every):
        acc = torch.zeros(1)
        for step in range(1, steps + 1):
            acc += self.train_step()
            if step % log_every == 0:
                dist.all_reduce(acc)
                if self.rank == 0:
                    print(f"step {step}: loss {acc.item() / log_every / dist.get_world_size():.5f}", flush=True)
                acc.zero_()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--micro-batch-size", type=int, default=17)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2)
    data = Catalogue()
    sampler = CyclicBatchSampler(len(data), args.micro_batch_size, rank, world, seed=40)
    loader = DataLoader(data, batch_sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 1)))
    Trainer(model, loader, args.lr, rank).fit(args.steps, log_every=15)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
