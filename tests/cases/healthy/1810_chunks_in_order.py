"""Truncated backpropagation over long signals; every process owns some of them."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts


class Recurrent(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.cell = nn.LSTM(1, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, x, state=None):
        h, state = self.cell(x, state)
        return self.out(h), state


def signals(n, length, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length + 1.0)
    f = 0.05 + 0.2 * torch.rand(n, 1, generator=g)
    return (torch.sin(f * t + 6.28 * torch.rand(n, 1, generator=g)) + 0.05 * torch.randn(n, length + 1, generator=g)).unsqueeze(2)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--passes", type=int, default=6)
    ap.add_argument("--chunk", type=int, default=20)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DDP(Recurrent())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    own = signals(16, 160, seed=1)[rank::world]
    held_out = signals(6, 60, seed=2)
    steps = own.shape[1] // args.chunk
    sched = CosineAnnealingWarmRestarts(opt, T_0=2 * steps)
    for number in range(args.passes):
        state = None
        for k in range(steps):
            lo = k * args.chunk
            x, y = own[:, lo : lo + args.chunk], own[:, lo + 1 : lo + args.chunk + 1]
            pred, state = model(x, state)
            state = tuple(s.detach() for s in state)
            loss = nn.functional.mse_loss(pred, y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
        with torch.no_grad():
            pred, _ = model.module(held_out[:, :-1])
            val = nn.functional.mse_loss(pred, held_out[:, 1:]).item()
        if rank == 0:
            print(f"pass {number}: held-out mse {val:.4f}, lr {sched.get_last_lr()[0]:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
