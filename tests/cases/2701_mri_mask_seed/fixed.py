"""Undersampled k-space reconstruction with a small convolutional denoiser (two processes, gloo)."""
import argparse
import json
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler


class RandomColumnMask:
    def __init__(self, center_fraction=0.12, acceleration=3):
        self.center_fraction = center_fraction
        self.acceleration = acceleration
        self.rng = np.random.RandomState()

    def __call__(self, width, seed=None):
        rng = self.rng if seed is None else np.random.RandomState(seed)
        low = int(round(width * self.center_fraction))
        prob = (width / self.acceleration - low) / (width - low)
        mask = rng.uniform(size=width) < prob
        pad = (width - low + 1) // 2
        mask[pad:pad + low] = True
        return torch.from_numpy(mask.astype(np.float32))


class SliceDataset(Dataset):
    def __init__(self, count, first_id, mask_func, rank, train=True, size=32):
        self.count, self.first_id, self.size = count, first_id, size
        self.mask_func = mask_func
        self.rank = rank
        self.train = train

    def __len__(self):
        return self.count

    def _phantom(self, index):
        rng = np.random.RandomState(self.first_id + index)
        yy, xx = np.mgrid[0:self.size, 0:self.size] / self.size
        image = np.zeros((self.size, self.size))
        for _ in range(5):
            cx, cy = rng.uniform(0.2, 0.8, 2)
            sx, sy = rng.uniform(0.04, 0.2, 2)
            image += rng.uniform(0.3, 1.0) * (((xx - cx) / sx) ** 2 + ((yy - cy) / sy) ** 2 < 1)
        return torch.from_numpy(image.astype(np.float32))

    def __getitem__(self, index):
        target = self._phantom(index)
        kspace = torch.fft.fftshift(torch.fft.fft2(target))
        mask = self.mask_func(self.size, seed=None if self.train else self.first_id + index)
        zero_filled = torch.fft.ifft2(torch.fft.ifftshift(kspace * mask[None, :])).abs()
        scale = zero_filled.std() + 1e-6
        return (zero_filled / scale)[None], (target / scale)[None]


def worker_init_fn(worker_id):
    info = get_worker_info()
    dataset = info.dataset
    seed = info.seed + dataset.rank * info.num_workers
    dataset.mask_func.rng.seed(seed % (2 ** 32))


class Denoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, 1, 3, padding=1),
        )

    def forward(self, x):
        return x + self.net(x)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    for x, y in loader:
        totals[0] += F.mse_loss(model(x), y, reduction="sum").double()
        totals[1] += y.numel()
    model.train()
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    train_set = SliceDataset(320, 0, RandomColumnMask(), rank, train=True)
    val_set = SliceDataset(64, 10_000, RandomColumnMask(), rank, train=False)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers,
                              worker_init_fn=worker_init_fn, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=16, sampler=DistributedSampler(val_set, shuffle=False))

    model = DDP(Denoiser())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    history = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = F.l1_loss(model(x), y)
            loss.backward()
            optimizer.step()
            running += torch.tensor([loss.item(), 1.0])
        scheduler.step()
        dist.all_reduce(running)
        val = evaluate(model.module, val_loader)
        history.append({"epoch": epoch, "train_l1": (running[0] / running[1]).item(), "val_mse": val})
        if rank == 0:
            print(history[-1], flush=True)
    if rank == 0:
        with open("history.json", "w") as handle:
            json.dump(history, handle)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
