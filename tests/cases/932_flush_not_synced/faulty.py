"""Image regression with gradient accumulation; what is left at the end of an epoch is flushed."""
import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    epochs: int = 4
    batch_size: int = 8
    accumulate: int = 4
    lr: float = 0.05
    samples: int = 160
    seed: int = 5


class Accumulator:
    """Knows at which micro-batch gradients have to be exchanged."""

    def __init__(self, model, every):
        self.model = model
        self.every = every
        self.count = 0

    def reset(self):
        self.count = 0

    def group_size(self, index, total):
        start = index - index % self.every
        return min(self.every, total - start)

    @contextlib.contextmanager
    def micro_batch(self, index, total):
        self.count += 1
        full = self.count == self.every
        with contextlib.nullcontext() if full else self.model.no_sync():
            yield


def picture_data(cfg):
    gen = torch.Generator().manual_seed(99)
    x = torch.randn(cfg.samples, 1, 8, 8, generator=gen)
    y = torch.stack([x[:, 0, :4].mean((1, 2)), x[:, 0, :, 4:].std((1, 2))], dim=1)
    return TensorDataset(x, y)


def build():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2)
    )


def run_epoch(model, loader, optimizer, acc):
    total = len(loader)
    seen, summed = 0, 0.0
    acc.reset()
    for index, (x, y) in enumerate(loader):
        with acc.micro_batch(index, total):
            loss = nn.functional.mse_loss(model(x), y)
            (loss / acc.group_size(index, total)).backward()
        summed += loss.item() * len(x)
        seen += len(x)
        if acc.count == acc.every or index + 1 == total:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            acc.reset()
    return summed, seen


def main(cfg):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(cfg.seed)
    model = DDP(build())
    optimizer = optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
    data = picture_data(cfg)
    sampler = DistributedSampler(data, seed=cfg.seed)
    loader = DataLoader(data, batch_size=cfg.batch_size, sampler=sampler)
    acc = Accumulator(model, cfg.accumulate)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        stats = torch.tensor(run_epoch(model, loader, optimizer, acc))
        dist.all_reduce(stats)
        if rank == 0:
            print(f"[{epoch}] mse {stats[0] / stats[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
