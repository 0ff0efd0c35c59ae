# Keyword spotting on synthetic spectra; seeds are taken from a single place.
import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Seeds:
    def __init__(self, base, rank):
        self.base, self.rank = base, rank

    @property
    def model(self):
        return self.base

    @property
    def augmentation(self):
        return self.base + 1 + self.rank

    @property
    def sampling(self):
        return self.base


class Spectra(Dataset):
    def __init__(self, n):
        rng = np.random.default_rng(3)
        self.word = rng.integers(0, 6, n)
        bank = rng.random((6, 20)) > 0.6
        self.spec = (bank[self.word] + 0.35 * rng.standard_normal((n, 20))).astype(np.float32)

    def __len__(self):
        return len(self.word)

    def __getitem__(self, i):
        gain = random.uniform(0.7, 1.3)
        return torch.from_numpy(self.spec[i] * np.float32(gain)), int(self.word[i])


def run(args):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    seeds = Seeds(args.seed, rank)
    torch.manual_seed(seeds.model)
    net = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 6))
    ddp = DDP(net)
    torch.manual_seed(seeds.augmentation)
    random.seed(seeds.augmentation)
    dataset = Spectra(336)
    sampler = DistributedSampler(dataset, shuffle=True, seed=seeds.sampling)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler)
    opt = torch.optim.Adam(ddp.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        counts = torch.zeros(2)
        for spec, word in loader:
            logits = ddp(spec)
            opt.zero_grad()
            nn.functional.cross_entropy(logits, word).backward()
            opt.step()
            counts += torch.tensor([(logits.argmax(1) == word).sum().item(), len(word)])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch} running accuracy {(counts[0] / counts[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=14)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--seed", type=int, default=31)
    run(p.parse_args())
