"""Regression on 'utterances' that are kept in a manifest keyed by name; duplicates in the manifest are removed."""
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def manifest(n=256):
    """speaker/utterance names as they come from two overlapping lists"""
    first = [f"spk{i % 8:02d}/utt{i:05d}" for i in range(n)]
    second = [f"spk{i % 8:02d}/utt{i:05d}" for i in range(n // 2, n)]
    return first + second


def features(name):
    seed = int.from_bytes(hashlib.sha1(name.encode()).digest()[:4], "big")
    g = torch.Generator().manual_seed(seed)
    return torch.randn(14, generator=g)


class Utterances(Dataset):
    def __init__(self, names):
        self.names = list(set(names))
        w = torch.linspace(-1, 1, 14)
        self.x = torch.stack([features(n) for n in self.names])
        self.y = (self.x @ w).sigmoid().unsqueeze(1)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def train(model, data, epochs, lr):
    opt = torch.optim.RMSprop(model.parameters(), lr=lr)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    rank, world = dist.get_rank(), dist.get_world_size()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        sq = torch.zeros(2)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            sq += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(sq)
        if rank == 0:
            print(f"epoch {epoch}: mse {(sq[0] / sq[1]).item():.5f} on {int(sq[1])} utterances, {world} ranks")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    assert "RANK" in os.environ
    torch.manual_seed(77)
    net = nn.Sequential(nn.Linear(14, 32), nn.ELU(), nn.Linear(32, 1))
    train(DDP(net), Utterances(manifest()), epochs=5, lr=2e-3)
    dist.destroy_process_group()
