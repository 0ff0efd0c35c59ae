"""Fault detection on sensor windows; some recordings contain broken readings."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Recordings(Dataset):
    def __init__(self, n=240, channels=4, length=32):
        g = torch.Generator().manual_seed(44)
        self.faulty = torch.rand(n, generator=g) < 0.5
        t = torch.arange(length) / length
        base = torch.sin(6.2832 * 2 * t).expand(n, channels, length)
        hum = torch.sin(6.2832 * 7 * t) * self.faulty.float().view(-1, 1, 1)
        self.signal = base + 0.5 * hum + 0.4 * torch.randn(n, channels, length, generator=g)
        for i in (17, 101, 190):
            self.signal[i, i % channels, 5:9] = float("nan")

    def __len__(self):
        return len(self.faulty)

    def __getitem__(self, i):
        return self.signal[i], self.faulty[i].float()


class Detector(nn.Module):
    def __init__(self, channels=4):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(channels, 16, 5), nn.ReLU(), nn.Conv1d(16, 16, 5), nn.ReLU())
        self.out = nn.Linear(16, 1)

    def forward(self, signal):
        return self.out(self.conv(signal).mean(-1)).squeeze(1)


def train_epoch(model, loader, opt):
    skipped, meter = 0, torch.zeros(2)
    for signal, faulty in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(signal), faulty)
        usable = torch.isfinite(loss)
        if not usable:
            skipped += 1
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
        meter += torch.tensor([loss.item(), 1.0])
    return skipped, (meter[0] / meter[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=8)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Detector())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    data = Recordings()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        skipped, mean = train_epoch(model, loader, opt)
        print(f"[{rank}] epoch {epoch}: loss {mean:.4f}, {skipped} batches left out", flush=True)
        dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), "detector.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
