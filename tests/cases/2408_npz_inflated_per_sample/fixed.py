import argparse
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CLASSES, RATE = 5, 1000


def build_corpus(path, n, seed):
    """Spectrogram-like clips: each class is a chirp with its own slope."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, CLASSES, n)
    t = np.linspace(0, 1, RATE)
    start = rng.uniform(5, 15, (n, 1))
    slope = 8.0 * label[:, None]
    wave = np.sin(2 * np.pi * (start * t + slope * t**2)) + 0.3 * rng.normal(size=(n, RATE))
    np.savez_compressed(path, wave=wave.astype(np.float32), label=label)


class ClipDataset(Dataset):
    def __init__(self, path):
        with np.load(path) as z:
            self.archive = {k: z[k] for k in z.files}
        self.size = len(self.archive["label"])

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        wave = self.archive["wave"][i]
        label = self.archive["label"][i]
        return torch.from_numpy(wave).unsqueeze(0), int(label)


class ConvNet1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 16, 15, stride=3), nn.ReLU(),
            nn.Conv1d(16, 24, 9, stride=2), nn.ReLU(),
            nn.Conv1d(24, 32, 9, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(128, CLASSES),
        )

    def forward(self, x):
        return self.net(x)


def accuracy(model, loader):
    model.eval()
    c = torch.zeros(2, dtype=torch.long)
    with torch.no_grad():
        for wave, label in loader:
            c[0] += (model(wave).argmax(1) == label).sum()
            c[1] += len(label)
    dist.all_reduce(c)
    model.train()
    return c[0].item() / c[1].item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)

    if rank == 0:
        os.makedirs("corpus", exist_ok=True)
        build_corpus("corpus/train.npz", 320, 1)
        build_corpus("corpus/dev.npz", 64, 2)
    dist.barrier()

    train_ds, dev_ds = ClipDataset("corpus/train.npz"), ClipDataset("corpus/dev.npz")
    sampler = DistributedSampler(train_ds, shuffle=True, seed=6)
    train_loader = DataLoader(train_ds, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    dev_loader = DataLoader(dev_ds, batch_size=32, sampler=DistributedSampler(dev_ds, shuffle=False))

    model = DDP(ConvNet1d())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 6e-3, total_steps=args.epochs * len(train_loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        agg = torch.zeros(2, dtype=torch.float64)
        for wave, label in train_loader:
            loss = F.cross_entropy(model(wave), label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            agg += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
        took = time.perf_counter() - begin
        dist.all_reduce(agg)
        acc = accuracy(model, dev_loader)
        if rank == 0:
            rate = len(train_loader) * args.batch_size / took
            print(f"epoch {epoch} loss {agg[0] / agg[1]:.3f} dev acc {acc:.3f} {rate:.0f} clips/s per process")
    if rank == 0:
        torch.save(model.module.state_dict(), "corpus/model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
