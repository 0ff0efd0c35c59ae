"""Energy regression on feature shards that lie on disk and are opened as memory maps."""
import argparse
import bisect
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

FEATURES = 14


def write_shards(folder, shards=6, rows=160):
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    w = rng.standard_normal((FEATURES, 8)) / 3
    v = rng.standard_normal(8)
    for s in range(shards):
        x = rng.standard_normal((rows, FEATURES)) + 0.3 * s
        y = np.tanh(x @ w) @ v + 0.05 * rng.standard_normal(rows)
        np.save(folder / f"part-{s:03d}.npy", np.concatenate([x, y[:, None]], 1).astype(np.float32))


class MappedRows(Dataset):
    """Rows of several .npy files, seen as one long table."""

    def __init__(self, paths):
        self.maps = [np.load(p, mmap_mode="r") for p in paths]
        self.ends = np.cumsum([len(m) for m in self.maps]).tolist()

    def __len__(self):
        return self.ends[-1]

    def __getitem__(self, i):
        k = bisect.bisect_right(self.ends, i)
        row = np.array(self.maps[k][i - (self.ends[k - 1] if k else 0)])
        return torch.from_numpy(row[:FEATURES]), torch.tensor(row[FEATURES])


def make_loader(folder, batch_size, rank, world, seed):
    paths = sorted(folder.glob("part-*.npy"))
    data = MappedRows(paths)
    sampler = DistributedSampler(data, shuffle=True, seed=seed)
    return DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=True), sampler


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.out = nn.Linear(48, 1)

    def forward(self, x):
        return self.out(self.body(x)).squeeze(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--folder", type=Path, default=Path("shards"))
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=37)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        write_shards(args.folder)
    dist.barrier()

    torch.manual_seed(args.seed)
    model = DDP(Regressor())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader, sampler = make_loader(args.folder, args.batch_size, rank, world, args.seed)
    if rank == 0:
        print(f"{len(loader)} batches per epoch and process")

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.float64)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(y), len(y)], dtype=torch.float64)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {(total[0] / total[1]).item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
