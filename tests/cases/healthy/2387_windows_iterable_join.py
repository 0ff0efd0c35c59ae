"""Multi-horizon forecasting: sliding windows streamed by an IterableDataset, ranks may end at different times."""
import argparse
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def make_series(n_series=11, length=420, seed=3):
    rng = np.random.default_rng(seed)
    t = np.arange(length)
    out = []
    for _ in range(n_series):
        season = rng.uniform(0.5, 1.5) * np.sin(2 * math.pi * t / 24 + rng.uniform(0, 6.28))
        week = rng.uniform(0.2, 0.6) * np.sin(2 * math.pi * t / 60 + rng.uniform(0, 6.28))
        ar = np.zeros(length)
        for i in range(1, length):
            ar[i] = 0.8 * ar[i - 1] + 0.1 * rng.normal()
        out.append(season + week + ar + rng.uniform(-2, 2))
    return np.stack(out).astype(np.float32)


class Scaler:
    """Fitted on the training part only."""

    def __init__(self, train):
        self.mean, self.std = train.mean(1, keepdims=True), train.std(1, keepdims=True)

    def __call__(self, x):
        return (x - self.mean) / self.std


class WindowStream(IterableDataset):
    def __init__(self, series, context, horizon, rank, world, stride=1, shuffle=False, seed=0):
        self.series, self.context, self.horizon = series, context, horizon
        self.rank, self.world, self.shuffle, self.seed, self.epoch = rank, world, shuffle, seed, 0
        last = series.shape[1] - context - horizon
        self.index = [(s, t) for s in range(len(series)) for t in range(0, last + 1, stride)]

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        n_workers, worker = (info.num_workers, info.id) if info else (1, 0)
        order = np.arange(len(self.index))
        if self.shuffle:
            np.random.default_rng((self.seed, self.epoch)).shuffle(order)
        for k in order[self.rank * n_workers + worker::self.world * n_workers]:
            s, t = self.index[k]
            w = self.series[s, t:t + self.context + self.horizon]
            yield torch.from_numpy(w[:self.context].copy()), torch.from_numpy(w[self.context:].copy())


class NBeatsBlock(nn.Module):
    def __init__(self, context, horizon, hidden):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(context, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.back, self.fore = nn.Linear(hidden, context), nn.Linear(hidden, horizon)

    def forward(self, x):
        h = self.fc(x)
        return self.back(h), self.fore(h)


class NBeats(nn.Module):
    def __init__(self, context, horizon, hidden=48, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(NBeatsBlock(context, horizon, hidden) for _ in range(blocks - 1))
        self.last = nn.Sequential(nn.Linear(context, hidden), nn.ReLU(), nn.Linear(hidden, horizon))

    def forward(self, x):
        level = x[:, -1:]
        x = x - level
        forecast = 0
        for block in self.blocks:
            back, fore = block(x)
            x, forecast = x - back, forecast + fore
        return forecast + self.last(x) + level


def train_epoch(model, loader, optimizer):
    total = torch.zeros(3, dtype=torch.float64)
    model.train()
    with Join([model]):
        for past, future in loader:
            loss = nn.functional.smooth_l1_loss(model(past), future)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(past), len(past), 1.0])
    seen = total.clone()
    dist.all_reduce(seen)
    return (seen[0] / seen[1]).item(), int(total[2].item())


@torch.no_grad()
def validate(module, loader):
    module.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for past, future in loader:
        err = (module(past) - future).abs()
        naive = (past[:, -1:] - future).abs()
        sums += torch.tensor([err.sum().item(), naive.sum().item(), err.numel()], dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, default=48)
    parser.add_argument("--horizon", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=29)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    series = make_series()
    cut = 328
    scale = Scaler(series[:, :cut])
    series = scale(series)
    train = WindowStream(series[:, :cut], args.context, args.horizon, rank, world, stride=1, shuffle=True, seed=11)
    valid = WindowStream(series[:, cut - args.context:], args.context, args.horizon, rank, world, stride=4)
    train_loader = DataLoader(train, batch_size=args.batch_size, num_workers=args.workers)
    valid_loader = DataLoader(valid, batch_size=64)

    model = DDP(NBeats(args.context, args.horizon))
    # no momentum: a rank that is through early shadows the others, its optimizer does not step with them
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs, eta_min=0.01)
    best = float("inf")
    for epoch in range(args.epochs):
        train.set_epoch(epoch)
        loss, steps = train_epoch(model, train_loader, optimizer)
        mae, naive = validate(model.module, valid_loader)
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: train loss {loss:.4f} ({steps} local steps) | mae {mae:.4f} naive {naive:.4f}")
            if mae < best:
                best = mae
                torch.save({"model": model.module.state_dict(), "epoch": epoch, "mae": mae,
                            "scaler": {"mean": scale.mean.tolist(), "std": scale.std.tolist()}}, "forecast_best.pt")
    dist.barrier()
    if rank == 0:
        assert os.path.exists("forecast_best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
