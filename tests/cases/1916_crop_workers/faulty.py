"""Counting cells in small images; random crops, brightness and noise are applied by loader workers."""
import argparse
import csv

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def render(n, size, seed):
    rng = np.random.default_rng(seed)
    yy, xx = np.mgrid[:size, :size]
    images, centres = np.zeros((n, size, size), np.float32), []
    for i in range(n):
        pts = rng.uniform(0, size, (rng.integers(2, 14), 2))
        for y, x in pts:
            images[i] += np.exp(-((yy - y) ** 2 + (xx - x) ** 2) / 3.0)
        centres.append(pts)
    return images, centres


class CellCrops(Dataset):
    def __init__(self, n, crop=20, size=28, seed=1):
        self.images, self.centres = render(n, size, seed)
        self.crop, self.size = crop, size
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        y0, x0 = self.rng.integers(0, self.size - self.crop + 1, 2)
        patch = self.images[i, y0 : y0 + self.crop, x0 : x0 + self.crop]
        patch = patch * self.rng.uniform(0.8, 1.2) + 0.1 * self.rng.standard_normal(patch.shape)
        c = self.centres[i] - [y0, x0]
        count = ((c >= 0) & (c < self.crop)).all(axis=1).sum()
        return torch.from_numpy(patch.astype(np.float32)).unsqueeze(0), torch.tensor(float(count))


def limit_threads(worker_id):
    torch.set_num_threads(1)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.density = nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1)
        )

    def forward(self, x):
        return self.density(x).sum((1, 2, 3)) / 10


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=43)
    ap.add_argument("--workers", type=int, default=2)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Counter())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed + 100 * (rank + 1))

    data = CellCrops(384)
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(
        data, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers, worker_init_fn=limit_threads
    )
    rows = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(3)
        for patch, count in loader:
            guess = model(patch)
            loss = nn.functional.smooth_l1_loss(guess, count)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(count), (guess - count).abs().sum().item(), len(count)])
        dist.all_reduce(sums)
        rows.append((epoch, (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()))
        if rank == 0:
            print("epoch %d loss %.4f mean error %.2f cells" % rows[-1], flush=True)
    if rank == 0:
        with open("curve.csv", "w", newline="") as f:
            csv.writer(f).writerows([("epoch", "loss", "mae"), *rows])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
