"""Molecule-like regression; the split follows the name of the molecule."""
import os
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


def bucket(name, buckets=10):
    return zlib.crc32(name.encode()) % buckets


class Molecules(Dataset):
    def __init__(self, part, n=600):
        g = torch.Generator().manual_seed(23)
        names = [f"C{i % 37}H{i % 53}N{i % 11}O{i}" for i in range(n)]
        feats = torch.randn(n, 12, generator=g)
        target = (feats[:, :6] * feats[:, 6:]).sum(1, keepdim=True) + 0.3 * torch.randn(n, 1, generator=g)
        keep = [i for i, name in enumerate(names) if (bucket(name) == 0) == (part == "val")]
        self.names = [names[i] for i in keep]
        self.feats, self.target = feats[keep], target[keep]

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        return self.feats[i], self.target[i]


class StepSampler:
    """a fixed number of batches an epoch, this rank's part of a common random order"""

    def __init__(self, data, batch, steps, rank, world):
        self.n, self.batch, self.steps, self.rank, self.world, self.epoch = len(data), batch, steps, rank, world, 0

    def __len__(self):
        return self.steps

    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch)
        mine = torch.randperm(self.n, generator=g)[self.rank :: self.world]
        for k in range(self.steps):
            yield mine[k * self.batch : (k + 1) * self.batch].tolist()


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    train, val = Molecules("train"), Molecules("val")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 64), nn.SiLU(), nn.Linear(64, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    sampler = StepSampler(train, 20, 12, rank, world)
    loader = DataLoader(train, batch_sampler=sampler)
    for epoch in range(5):
        sampler.epoch = epoch
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            x, y = val.feats[rank::world], val.target[rank::world]
            score = torch.tensor([nn.functional.mse_loss(model.module(x), y, reduction="sum").item(), float(len(y))])
        dist.all_reduce(score)
        if rank == 0:
            print(f"epoch {epoch}: validation mse {(score[0] / score[1]).item():.4f} on {int(score[1])} molecules")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
