"""Time-series forecaster with frequent validation inside the epoch."""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@contextlib.contextmanager
def inference(model):
    """eval() and no_grad() inside, the previous mode afterwards."""
    mode = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield model
    finally:
        model.train(mode)


def reduce_mean(value, count):
    pair = torch.tensor([value, count], dtype=torch.float64)
    dist.all_reduce(pair)
    return (pair[0] / pair[1]).item()


class Forecaster(nn.Module):
    def __init__(self, window=24, horizon=4):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 16, 5, padding=2), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16 * window, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, horizon))

    def forward(self, x):
        return self.head(self.conv(x.unsqueeze(1)))


def waves(n, seed):
    g = torch.Generator().manual_seed(seed)
    f = 0.1 + 0.5 * torch.rand(n, 1, generator=g)
    p = 6.28 * torch.rand(n, 1, generator=g)
    s = torch.sin(f * torch.arange(28.0) + p) + 0.1 * torch.randn(n, 28, generator=g)
    return TensorDataset(s[:, :24], s[:, 24:])


def validate(model, loader):
    total, n = 0.0, 0
    with inference(model) as net:
        for x, y in loader:
            total += (net(x) - y).abs().mean(1).sum().item()
            n += len(x)
    return reduce_mean(total, n)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--val-every", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(21 + rank)
    train, valid = waves(400, 1), waves(80, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=20, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=20, sampler=DistributedSampler(valid, shuffle=False))
    model = DDP(Forecaster())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.smooth_l1_loss(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.val_every == 0:
                mae = validate(model, valid_loader)
                if rank == 0:
                    print(f"step {step}: validation MAE {mae:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
