"""Classifier on spectra that lie in packed archives, one archive a measuring day."""
import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

POINTS, KINDS = 160, 5


def write_days(folder, days, per_day):
    folder.mkdir(parents=True, exist_ok=True)
    gen = np.random.default_rng(0)
    axis = np.arange(POINTS)
    for day in range(days):
        kind = gen.integers(KINDS, size=per_day)
        centre = 20 + 28 * kind + gen.normal(0, 3, per_day)
        second = (centre + 45) % POINTS
        spectrum = np.exp(-((axis - centre[:, None]) ** 2) / 40) + 0.6 * np.exp(-((axis - second[:, None]) ** 2) / 25)
        spectrum += gen.normal(0, 0.35, spectrum.shape)
        np.savez_compressed(folder / f"day_{day:02d}.npz", spectrum=spectrum.astype(np.float32), kind=kind)


class Archive:
    """Reads one day's file."""

    def __init__(self, path):
        self.path = path
        with np.load(path) as packed:
            self.content = {name: packed[name] for name in packed.files}
        self.size = len(self.content["kind"])

    def row(self, i):
        return self.content["spectrum"][i], int(self.content["kind"][i])


class Days(Dataset):
    def __init__(self, folder):
        self.archives = [Archive(path) for path in sorted(Path(folder).glob("day_*.npz"))]
        self.ends = np.cumsum([archive.size for archive in self.archives])

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, i):
        day = int(np.searchsorted(self.ends, i, side="right"))
        archive = self.archives[day]
        spectrum, kind = archive.row(i - (self.ends[day] - archive.size))
        return torch.from_numpy(np.array(spectrum)), kind


class SpectrumNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, 32, 9, stride=2, padding=4), nn.ReLU(),
            nn.Conv1d(32, 64, 9, stride=2, padding=4), nn.ReLU(),
            nn.Conv1d(64, 64, 9, stride=2, padding=4), nn.ReLU())
        self.head = nn.Linear(64 * 20, KINDS)

    def forward(self, x):
        return self.head(self.conv(x[:, None]).flatten(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("spectra"))
    parser.add_argument("--days", type=int, default=4)
    parser.add_argument("--per-day", type=int, default=240)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_days(args.folder, args.days, args.per_day)
    dist.barrier()

    torch.manual_seed(3)
    data = Days(args.folder)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    model = DDP(SpectrumNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for spectrum, kind in loader:
            loss = F.cross_entropy(model(spectrum), kind)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {int(total[1]) // world} steps, loss {total[0] / total[1]:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
