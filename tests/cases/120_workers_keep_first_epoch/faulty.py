"""Texture patches with random crops that are keyed by (seed, epoch, index)."""
import multiprocessing as mp
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Patches(Dataset):
    def __init__(self, n=256, crop=10, seed=0):
        g = torch.Generator().manual_seed(61)
        self.label = torch.randint(0, 3, (n,), generator=g)
        base = torch.stack([torch.arange(14) % (k + 2) for k in range(3)]).float()
        self.image = base[self.label].unsqueeze(1).repeat(1, 14, 1) + 0.7 * torch.randn(n, 14, 14, generator=g)
        self.crop, self.seed = crop, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        key = hash((self.seed, self.epoch, i))
        g = torch.Generator().manual_seed(key)
        top, left = torch.randint(0, 14 - self.crop + 1, (2,), generator=g).tolist()
        patch = self.image[i, top : top + self.crop, left : left + self.crop]
        if torch.rand((), generator=g) < 0.5:
            patch = patch.flip(0)
        return patch.unsqueeze(0), self.label[i]


def network():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(192, 3)
    )


class Loop:
    def __init__(self, data, batch, rank):
        self.rank, self.data = rank, data
        self.sampler = DistributedSampler(data, shuffle=True)
        self.loader = DataLoader(data, batch_size=batch, sampler=self.sampler, num_workers=2, persistent_workers=True)
        self.model = DistributedDataParallel(network())
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def epoch(self, number):
        self.sampler.set_epoch(number)
        self.data.set_epoch(number)
        agg = torch.zeros(3)
        for patch, label in self.loader:
            out = self.model(patch)
            loss = nn.functional.cross_entropy(out, label)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            agg += torch.tensor([loss.item() * len(label), (out.argmax(1) == label).sum().item(), len(label)])
        dist.all_reduce(agg)
        if self.rank == 0:
            print(f"epoch {number}: loss {(agg[0] / agg[2]).item():.4f}, accuracy {(agg[1] / agg[2]).item():.3f}")


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    loop = Loop(Patches(), batch=16, rank=rank)
    for number in range(4):
        loop.epoch(number)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
