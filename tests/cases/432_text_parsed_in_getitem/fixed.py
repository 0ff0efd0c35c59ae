"""Spectra classifier; the instrument writes one text line per spectrum."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def instrument(n=192, bins=2500):
    rng = np.random.default_rng(8)
    axis = np.linspace(0, 1, bins)
    for k in range(n):
        kind = k % 3
        peak = 0.2 + 0.3 * kind + 0.05 * rng.standard_normal()
        values = np.exp(-(((axis - peak) / 0.04) ** 2)) + 0.05 * rng.standard_normal(bins)
        yield f"{kind}; " + " ".join(f"{v:.4f}" for v in values)


def parse(line):
    kind, values = line.split(";")
    numbers = []
    for token in values.split():
        numbers.append(float(token))
    spectrum = torch.tensor(numbers)
    return spectrum.unfold(0, 10, 10).mean(1), int(kind)


class Spectra(Dataset):
    def __init__(self, lines):
        self.samples = [parse(line) for line in lines]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    data = Spectra(list(instrument()))
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    torch.manual_seed(4)
    model = DDP(nn.Sequential(nn.Linear(250, 24), nn.ReLU(), nn.Linear(24, 3)))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    start = time.time()
    for epoch in range(10):
        sampler.set_epoch(epoch)
        right = torch.zeros(2)
        for x, y in loader:
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            right += torch.tensor([(out.argmax(1) == y).sum(), len(y)])
        dist.all_reduce(right)
    if rank == 0:
        print(f"accuracy {(right[0] / right[1]).item():.3f} after {time.time() - start:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
