"""Forecast the next value of noisy oscillators."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Oscillators(Dataset):
    def __init__(self, n=256, steps=20):
        g = torch.Generator().manual_seed(73)
        freq = 0.2 + 0.6 * torch.rand(n, 1, generator=g)
        phase = 6.28 * torch.rand(n, 1, generator=g)
        t = torch.arange(steps + 1)
        self.wave = torch.sin(freq * t + phase) + 0.05 * torch.randn(n, steps + 1, generator=g)

    def __len__(self):
        return len(self.wave)

    def __getitem__(self, i):
        return self.wave[i, :-1, None], self.wave[i, -1:]


class Forecaster(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.rnn = nn.GRU(1, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)

    model = DistributedDataParallel(Forecaster())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = Oscillators()
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(args.epochs)
        running = torch.zeros(1)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += loss.detach()
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch}: loss {running.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
