"""Gesture recognition with a recurrent net; the learning rate follows the validation loss."""
import argparse
import csv
import os
import time
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Gestures(Dataset):
    """Two-channel trajectories; the class is the kind of motion."""

    KINDS = 5

    def __init__(self, size, seed, steps=24, noise=0.6):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, self.KINDS, (size,), generator=g)
        t = torch.linspace(0, 1, steps)
        freq = 1 + self.y.float().unsqueeze(1) * 0.7
        phase = torch.rand(size, 1, generator=g) * 6.28
        wave = torch.stack([(6.28 * freq * t + phase).sin(), (6.28 * freq * t * 0.5 + phase).cos()], 2)
        self.x = wave + noise * torch.randn(size, steps, 2, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class GestureNet(nn.Module):
    def __init__(self, hidden=40):
        super().__init__()
        self.conv = nn.Conv1d(2, 16, 5, padding=2)
        self.rnn = nn.GRU(16, hidden, batch_first=True)
        self.attend = nn.Linear(hidden, 1)
        self.out = nn.Linear(hidden, Gestures.KINDS)

    def forward(self, x):
        h = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        h, _ = self.rnn(h)
        w = self.attend(h).softmax(1)
        return self.out((w * h).sum(1))


class Timer:
    def __init__(self):
        self.total = defaultdict(float)

    def measure(self, name):
        timer, start = self, None

        class _Span:
            def __enter__(self):
                nonlocal start
                start = time.perf_counter()

            def __exit__(self, *exc):
                timer.total[name] += time.perf_counter() - start

        return _Span()


class CsvWriter:
    def __init__(self, path, fields):
        self.path, self.fields = path, fields
        with open(path, "w", newline="") as f:
            csv.DictWriter(f, fields).writeheader()

    def row(self, **values):
        with open(self.path, "a", newline="") as f:
            csv.DictWriter(f, self.fields).writerow(values)


def merge(totals):
    """Adds up the counters of all processes."""
    t = torch.tensor(totals, dtype=torch.float64)
    dist.all_reduce(t)
    return t.tolist()


class Experiment:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        self.train_set = Gestures(600, seed=1)
        self.valid_set = Gestures(240, seed=2)
        self.sampler = DistributedSampler(self.train_set, shuffle=True, seed=args.seed)
        self.train_loader = DataLoader(self.train_set, args.batch_size, sampler=self.sampler)
        valid_sampler = DistributedSampler(self.valid_set, shuffle=False)
        self.valid_loader = DataLoader(self.valid_set, 60, sampler=valid_sampler)
        torch.manual_seed(args.seed)
        self.model = DDP(GestureNet())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.scheduler = ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0, threshold=args.threshold)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
        self.timer = Timer()
        self.writer = CsvWriter("gestures.csv", ["epoch", "lr", "train", "valid", "accuracy"]) if self.rank == 0 else None

    def lr(self):
        return self.optimizer.param_groups[0]["lr"]

    def train_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        loss_sum = count = 0.0
        for x, y in self.train_loader:
            loss = self.criterion(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
            self.optimizer.step()
            loss_sum += loss.item() * len(y)
            count += len(y)
        loss_sum, count = merge([loss_sum, count])
        return loss_sum / count

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        loss_sum = hits = count = 0.0
        for x, y in self.valid_loader:
            out = self.model(x)
            loss_sum += self.criterion(out, y).item() * len(y)
            hits += (out.argmax(1) == y).sum().item()
            count += len(y)
        loss_sum, hits, count = merge([loss_sum, hits, count])
        return loss_sum / count, hits / count

    def checkpoint(self, epoch):
        if self.rank == 0:
            torch.save({
                "epoch": epoch,
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
            }, self.args.ckpt)
        dist.barrier()

    def run(self):
        for epoch in range(self.args.epochs):
            with self.timer.measure("train"):
                train_loss = self.train_epoch(epoch)
            with self.timer.measure("valid"):
                valid_loss, accuracy = self.validate()
            lr = self.lr()
            self.scheduler.step(valid_loss)
            if self.rank == 0:
                self.writer.row(epoch=epoch, lr=lr, train=round(train_loss, 5), valid=round(valid_loss, 5), accuracy=round(accuracy, 4))
                print(f"epoch {epoch:2d} lr {lr:.5f} train {train_loss:.4f} valid {valid_loss:.4f} acc {accuracy:.3f}")
            self.checkpoint(epoch)
        if self.rank == 0:
            print("seconds", {k: round(v, 2) for k, v in self.timer.total.items()})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=25)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--threshold", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--ckpt", default="gestures.pt")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    Experiment(args).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
