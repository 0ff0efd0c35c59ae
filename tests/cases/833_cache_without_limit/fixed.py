"""Spectrogram classification with a feature cache."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Clips(Dataset):
    def __init__(self, n=256, length=8192):
        g = torch.Generator().manual_seed(54)
        self.pitch = torch.randint(0, 4, (n,), generator=g)
        t = torch.arange(length) / length
        self.wave = torch.sin(2 * 3.1416 * (30 + 25 * self.pitch[:, None]) * t)
        self.wave += 0.5 * torch.randn(n, length, generator=g)
        self.cache = {}

    def __len__(self):
        return len(self.pitch)

    def __getitem__(self, i):
        shift = int(torch.randint(0, 4096, ()))
        if i not in self.cache:
            self.cache[i] = self.spectrum(i)
        return self.cache[i].roll(shift, dims=0), self.pitch[i]

    def spectrum(self, i):
        frames = self.wave[i].unfold(0, 128, 32)
        return torch.fft.rfft(frames * torch.hann_window(128)).abs().log1p()[:, :64]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(64, 16, 5, stride=2)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(torch.relu(self.conv(x.transpose(1, 2))).mean(2))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=12)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = DDP(Net())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = Clips()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, pitch in loader:
            loss = nn.functional.cross_entropy(model(x), pitch)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
