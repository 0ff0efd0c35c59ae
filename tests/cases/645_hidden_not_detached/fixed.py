"""Truncated BPTT on long signals, hidden state carried from window to window."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Follower(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.cell = nn.GRU(2, hidden, batch_first=True)
        self.read = nn.Linear(hidden, 1)

    def forward(self, x, h):
        y, h = self.cell(x, h)
        return self.read(y).squeeze(-1), h


def signals(n, length, rank):
    g = torch.Generator().manual_seed(300 + rank)
    u = torch.randn(n, length, 2, generator=g)
    y = torch.zeros(n, length)
    for t in range(1, length):
        y[:, t] = 0.8 * y[:, t - 1] + 0.3 * u[:, t, 0] - 0.1 * u[:, t - 1, 1]
    return u, y


def windows(u, y, size):
    for start in range(0, u.size(1), size):
        yield u[:, start : start + size], y[:, start : start + size]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--length", type=int, default=400)
    ap.add_argument("--window", type=int, default=10)
    ap.add_argument("--batch", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Follower())
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    u, y = signals(args.batch, args.length, rank)
    for epoch in range(args.epochs):
        h = torch.zeros(1, args.batch, 32)
        total, n = 0.0, 0
        for uw, yw in windows(u, y, args.window):
            opt.zero_grad()
            h = h.detach()
            out, h = model(uw, h)
            loss = nn.functional.mse_loss(out, yw)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with torch.no_grad():
                total, n = total + loss.item(), n + 1
            opt.step()
        mean = torch.tensor(total / n)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: mse {mean.item() / world:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
