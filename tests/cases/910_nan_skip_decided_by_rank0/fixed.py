"""Station forecast; some records are damaged (NaN), such batches are skipped on all ranks."""
import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Stations(Dataset):
    def __init__(self, n=288, window=12, damaged=(37, 110, 205)):
        g = torch.Generator().manual_seed(5)
        t = torch.arange(n + window + 1).float()
        series = torch.sin(0.3 * t) + 0.4 * torch.sin(0.11 * t) + 0.05 * torch.randn(len(t), generator=g)
        self.x = series.unfold(0, window, 1)[:n].clone()
        self.y = series[window:window + n].unsqueeze(1).clone()
        for i in damaged:
            self.y[i] = math.nan

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class SpikeGuard:
    """Skip a batch whose loss is not finite or far above the recent mean."""

    def __init__(self, factor=30.0, decay=0.9):
        self.factor, self.decay, self.mean = factor, decay, None

    def is_bad(self, value):
        if not math.isfinite(value):
            return True
        if self.mean is not None and value > self.factor * self.mean:
            return True
        self.mean = value if self.mean is None else self.decay * self.mean + (1 - self.decay) * value
        return False


def skip_batch(guard, loss, rank):
    flag = torch.zeros(1)
    flag.fill_(float(guard.is_bad(loss.item())))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=12)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = Stations()
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    guard = SpikeGuard()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stats = torch.zeros(3)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            if skip_batch(guard, loss, rank):
                stats[2] += 1
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([loss.item(), 1.0, 0.0])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: mse {(stats[0] / stats[1]).item():.4f}, skipped {int(stats[2])}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
