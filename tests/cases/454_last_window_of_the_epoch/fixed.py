"""Accumulation over four batches; 14 batches an epoch."""
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Windowed:
    """yields (batch, is_window_end, window_size)"""

    def __init__(self, loader, window):
        self.loader, self.window = loader, window

    def __iter__(self):
        n = len(self.loader)
        for i, batch in enumerate(self.loader):
            begin = i // self.window * self.window
            size = min(self.window, n - begin)
            yield batch, i + 1 == begin + size, size


def sync_context(model, i, window, end):
    return contextlib.nullcontext() if end else model.no_sync()


def train_epoch(model, opt, batches):
    seen = torch.zeros(2)
    for i, ((x, y), end, size) in enumerate(batches):
        with sync_context(model, i, batches.window, end):
            loss = nn.functional.smooth_l1_loss(model(x), y)
            (loss / size).backward()
        if end:
            opt.step()
            opt.zero_grad()
        seen += torch.tensor([loss.item(), 1.0])
    return seen


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    g = torch.Generator().manual_seed(0)
    x = torch.rand(448, 5, generator=g)
    y = torch.stack([x[:, :2].prod(1), x[:, 2:].max(1).values], 1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(5, 48), nn.GELU(), nn.Linear(48, 2)))
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        seen = train_epoch(model, opt, Windowed(loader, 4))
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: {(seen[0] / seen[1]).item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
