"""Forecasting from a stream of shard files: IterableDataset, shards divided over processes and their workers."""
import argparse
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

PAST, FUTURE = 48, 8


def write_shards(folder, shards, per_shard, seed):
    folder.mkdir(parents=True, exist_ok=True)
    for s in range(shards):
        rng = np.random.default_rng([seed, s])
        t = np.arange(PAST + FUTURE)
        period = rng.uniform(8, 20, (per_shard, 1))
        series = np.sin(2 * np.pi * t / period + rng.uniform(0, 6.28, (per_shard, 1))) * rng.uniform(0.5, 2, (per_shard, 1))
        series += 0.02 * t * rng.normal(size=(per_shard, 1)) + 0.1 * rng.normal(size=(per_shard, PAST + FUTURE))
        partial = folder / f".shard-{s:04d}.npy"
        np.save(partial, series.astype(np.float32))
        partial.rename(folder / f"shard-{s:04d}.npy")


class ShardStream(IterableDataset):
    """Every shard is read by exactly one worker of one process in each epoch.

    The order of the shards is drawn from (seed, epoch), the same on all processes; the records pass through a shuffle
    buffer. Shards hold equal numbers of records and divide evenly, so all processes see equally many batches.
    """

    def __init__(self, folder, rank, world, buffer=64, seed=0, shuffle=True):
        self.files = sorted(str(p) for p in folder.glob("shard-*.npy"))
        self.rank, self.world, self.buffer, self.seed, self.shuffle = rank, world, buffer, seed, shuffle
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _my_files(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        consumers, me = self.world * workers, self.rank * workers + worker
        if len(self.files) % consumers:
            raise RuntimeError(f"{len(self.files)} shards cannot be divided over {consumers} readers")
        files = list(self.files)
        if self.shuffle:
            np.random.default_rng([self.seed, self.epoch]).shuffle(files)
        return files[me::consumers], np.random.default_rng([self.seed, self.epoch, 1 + me])

    def _records(self, files):
        for path in files:
            for row in np.load(path, mmap_mode="r"):
                yield torch.from_numpy(np.array(row))

    def __iter__(self):
        files, rng = self._my_files()
        if not self.shuffle:
            yield from self._records(files)
            return
        held = []
        for record in self._records(files):
            if len(held) < self.buffer:
                held.append(record)
                continue
            k = rng.integers(len(held))
            out, held[k] = held[k], record
            yield out
        rng.shuffle(order := np.arange(len(held)))
        for k in order:
            yield held[k]


class CausalConv(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(channels, channels, 3, dilation=dilation)
        self.norm = nn.GroupNorm(1, channels)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(nn.functional.pad(x, (self.pad, 0)))))


class Forecaster(nn.Module):
    def __init__(self, channels=32):
        super().__init__()
        self.lift = nn.Conv1d(1, channels, 1)
        self.tower = nn.Sequential(*(CausalConv(channels, 2 ** k) for k in range(4)))
        self.head = nn.Linear(channels, FUTURE)

    def forward(self, past):
        level = past[:, -1:]
        return level + self.head(self.tower(self.lift((past - level).unsqueeze(1)))[:, :, -1])


@torch.no_grad()
def validate(model, loader):
    model.eval()
    squared = torch.zeros(2, dtype=torch.float64)
    for series in loader:
        past, future = series.split([PAST, FUTURE], dim=1)
        error = model(past) - future
        squared += torch.tensor([error.pow(2).sum().item(), error.numel()], dtype=torch.float64)
    dist.all_reduce(squared)
    model.train()
    return math.sqrt(squared[0] / squared[1])


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    root = Path(args.data)
    if rank == 0:
        write_shards(root / "train", shards=8, per_shard=160, seed=1)
        write_shards(root / "valid", shards=4, per_shard=64, seed=2)
    dist.barrier()  # the listing below must see all files

    train = ShardStream(root / "train", rank, world, seed=5)
    valid = ShardStream(root / "valid", rank, world, shuffle=False)
    # Workers start anew in every epoch and so take the current value of train.epoch with them.
    train_loader = DataLoader(train, batch_size=args.batch, num_workers=args.workers, drop_last=True)
    valid_loader = DataLoader(valid, batch_size=64)

    torch.manual_seed(4)
    ddp = DDP(Forecaster())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)
    loss_fn = nn.HuberLoss()

    for epoch in range(args.epochs):
        train.set_epoch(epoch)
        meter = torch.zeros(2)
        for series in train_loader:
            past, future = series.split([PAST, FUTURE], dim=1)
            loss = loss_fn(ddp(past), future)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter += torch.tensor([loss.item(), 1.0])
        scheduler.step()
        dist.all_reduce(meter)
        rmse = validate(ddp.module, valid_loader)
        if rank == 0:
            print(f"epoch {epoch}: batches {int(meter[1])} huber {meter[0] / meter[1]:.4f} valid rmse {rmse:.4f}", flush=True)

    if rank == 0:
        torch.save(ddp.module.state_dict(), "forecaster.pt.tmp")
        os.replace("forecaster.pt.tmp", "forecaster.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="shards")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    main(parser.parse_args())
