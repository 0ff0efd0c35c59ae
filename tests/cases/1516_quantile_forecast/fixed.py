"""Quantile forecast of a traffic counter: one head for each quantile."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

QUANTILES = (0.1, 0.5, 0.9)


class Traffic(Dataset):
    def __init__(self, length=420, window=24, seed=14):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(length).float()
        level = 1.5 * torch.sin(6.2832 * t / 24) + 0.6 * torch.sin(6.2832 * t / 84)
        self.counter = level + 0.25 * torch.randn(length, generator=g)
        self.window = window

    def __len__(self):
        return len(self.counter) - self.window

    def __getitem__(self, i):
        return self.counter[i : i + self.window], self.counter[i + self.window]


class Forecaster(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.gru = nn.GRU(1, width, batch_first=True)
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in QUANTILES)

    def forward(self, history):
        _, state = self.gru(history.unsqueeze(-1))
        return [head(state[-1]).squeeze(1) for head in self.heads]


def pinball(predictions, target):
    loss = 0.0
    for q, pred in zip(QUANTILES, predictions):
        error = target - pred
        loss = loss + torch.maximum(q * error, (q - 1) * error).mean()
    return loss / len(QUANTILES)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=18)
    ap.add_argument("--lr", type=float, default=8e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(10)
    model = DDP(Forecaster())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = Traffic()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        meter = torch.zeros(2)
        for history, target in loader:
            loss = pinball(model(history), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            meter += torch.tensor([loss.item() * len(target), len(target)])
        dist.all_reduce(meter)
        if rank == 0:
            print(f"epoch {epoch}: pinball loss {(meter[0] / meter[1]).item():.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "traffic.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
