"""Streaming regression on sensor windows: IterableDataset, loader workers, gradient accumulation."""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class SensorStream(IterableDataset):
    """Generates windows from record ids; records are visited in an epoch-dependent order."""

    def __init__(self, n_records, window, rank, world_size, seed, shuffle=True):
        self.n_records, self.window = n_records, window
        self.rank, self.world_size = rank, world_size
        self.seed, self.shuffle, self.epoch = seed, shuffle, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def make_record(self, idx):
        rng = np.random.default_rng((self.seed, int(idx)))
        freq, phase, amp = rng.uniform(0.5, 3.0), rng.uniform(0, 2 * np.pi), rng.uniform(0.5, 1.5)
        t = np.linspace(0.0, 1.0, self.window)
        channels = np.stack([
            amp * np.sin(2 * np.pi * freq * t + phase),
            amp * np.cos(2 * np.pi * freq * t + phase),
        ]) + rng.normal(0, 0.05, (2, self.window))
        return channels.astype(np.float32), np.float32([freq, amp])

    def __iter__(self):
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        order = np.arange(self.n_records)
        if self.shuffle:
            np.random.default_rng((self.seed, self.epoch)).shuffle(order)
        first = self.rank * num_workers + worker
        stride = self.world_size
        for idx in order[first::stride]:
            yield self.make_record(idx)


class ConvRegressor(nn.Module):
    def __init__(self, channels=2, width=24):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(channels, width, 5, padding=2), nn.GELU(), nn.GroupNorm(4, width),
            nn.Conv1d(width, width, 5, stride=2, padding=2), nn.GELU(), nn.GroupNorm(4, width),
            nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(4 * width, 2),
        )

    def forward(self, x):
        return self.net(x)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = DDP(ConvRegressor())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.criterion = nn.SmoothL1Loss()
        self.train_set = SensorStream(args.records, args.window, self.rank, self.world, seed=3)
        self.eval_set = SensorStream(512, args.window, self.rank, self.world, seed=4, shuffle=False)
        self.train_loader = DataLoader(self.train_set, batch_size=args.batch_size,
                                       num_workers=args.workers, drop_last=True)
        self.eval_loader = DataLoader(self.eval_set, batch_size=64)

    def train_epoch(self):
        total, count = 0.0, 0
        self.optimizer.zero_grad()
        for i, (x, y) in enumerate(self.train_loader):
            last = (i + 1) % self.args.accumulate == 0
            if last:
                loss = self.criterion(self.model(x), y)
                (loss / self.args.accumulate).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            else:
                with self.model.no_sync():
                    loss = self.criterion(self.model(x), y)
                    (loss / self.args.accumulate).backward()
            total += loss.item() * len(x)
            count += len(x)
        stats = torch.tensor([total, count], dtype=torch.float64)
        dist.all_reduce(stats)
        return (stats[0] / stats[1]).item(), int(stats[1])

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        stats = torch.zeros(2, dtype=torch.float64)
        for x, y in self.eval_loader:
            err = (self.model.module(x) - y).abs().mean(dim=1)
            stats += torch.tensor([err.sum().item(), len(x)], dtype=torch.float64)
        dist.all_reduce(stats)
        self.model.train()
        return (stats[0] / stats[1]).item()

    def run(self):
        for epoch in range(self.args.epochs):
            self.train_set.set_epoch(epoch)
            loss, seen = self.train_epoch()
            mae = self.evaluate()
            if self.rank == 0:
                print(f"epoch {epoch}: loss {loss:.4f} mae {mae:.4f} ({seen} windows)", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--records", type=int, default=4104)
    ap.add_argument("--window", type=int, default=64)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--accumulate", type=int, default=2)
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=int(os.environ.get("SEED", 13)))
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Trainer(args).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
