"""Neural field fitting with a memory-lean sine activation written as an autograd.Function."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ScaledTanh(torch.autograd.Function):
    """tanh(w * x); the backward needs only the output."""

    @staticmethod
    def forward(ctx, x, w):
        y = torch.tanh(w * x)
        ctx.w = w
        ctx.y = y
        return y

    @staticmethod
    def backward(ctx, grad):
        y = ctx.y
        return grad * ctx.w * (1 - y * y), None


class FieldLayer(nn.Module):
    def __init__(self, fan_in, fan_out, w):
        super().__init__()
        self.linear = nn.Linear(fan_in, fan_out)
        self.w = w

    def forward(self, x):
        return ScaledTanh.apply(self.linear(x), self.w)


class Field(nn.Module):
    def __init__(self, width=128, depth=3):
        super().__init__()
        layers = [FieldLayer(2, width, 6.0)]
        layers += [FieldLayer(width, width, 1.0) for _ in range(depth - 1)]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, coords):
        return self.net(coords)


def picture(coords):
    x, y = coords.unbind(1)
    return (torch.sin(9 * x) * torch.cos(7 * y) + (x * x + y * y < 0.3).float()).unsqueeze(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=240)
    ap.add_argument("--points", type=int, default=1024)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Field())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    gen = torch.Generator().manual_seed(100 + rank)  # every rank samples its own points
    running = torch.zeros(1)
    for step in range(1, args.steps + 1):
        coords = 2 * torch.rand(args.points, 2, generator=gen) - 1
        loss = nn.functional.mse_loss(model(coords), picture(coords))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.detach()
        if step % 60 == 0:
            dist.all_reduce(running)
            if rank == 0:
                print(f"step {step}: mse {running.item() / 60 / dist.get_world_size():.4f}", flush=True)
            running.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
