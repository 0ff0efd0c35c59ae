"""Neural ODE style integrator: many small steps make a long graph per batch."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Field(nn.Module):
    def __init__(self, dim=3, width=128):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(dim, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, dim))

    def forward(self, x, steps, dt):
        path = []
        for _ in range(steps):
            x = x + dt * self.f(x)
            path.append(x)
        return torch.stack(path, 1)


def lorenz(x, steps, dt):
    out = []
    for _ in range(steps):
        a, b, c = x.unbind(1)
        x = x + dt * torch.stack([10 * (b - a) / 10, a * (2.8 - c) - b / 2, a * b - 0.8 * c], 1)
        out.append(x)
    return torch.stack(out, 1)


class History:
    """losses of the whole run, for a curve at the end"""

    def __init__(self):
        self.train = []

    def push(self, loss):
        self.train.append(loss)

    def blocks(self, size):
        values = torch.tensor([float(v) for v in self.train])
        return values.view(-1, size).mean(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=50)
    parser.add_argument("--horizon", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)
    model = DDP(Field())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    history = History()
    for it in range(args.iters):
        x0 = torch.randn(args.batch, 3)
        target = lorenz(x0, args.horizon, 0.05)
        loss = nn.functional.mse_loss(model(x0, args.horizon, 0.05), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.push(loss)
    curve = history.blocks(10)
    dist.all_reduce(curve)
    if rank == 0:
        print("loss curve:", " ".join(f"{v / world:.4f}" for v in curve.tolist()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
