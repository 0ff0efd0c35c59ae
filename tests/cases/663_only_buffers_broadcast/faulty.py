"""Ordinal regression; per-rank seeds for dropout, manual gradient averaging."""
import argparse

import torch
import torch.distributed as dist
from torch import nn


class Ordinal(nn.Module):
    def __init__(self, levels=5):
        super().__init__()
        self.norm = nn.BatchNorm1d(11)
        self.body = nn.Sequential(nn.Linear(11, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 1))
        self.cuts = nn.Parameter(torch.linspace(-2, 2, levels - 1))

    def forward(self, x):
        return self.body(self.norm(x)) - self.cuts


def broadcast_state(model, src=0):
    for t in model.buffers():
        dist.broadcast(t.data, src)


def average(params):
    world = dist.get_world_size()
    works = [dist.all_reduce(p.grad, async_op=True) for p in params]
    for p, w in zip(params, works):
        w.wait()
        p.grad.div_(world)


def grades(n=400):
    g = torch.Generator().manual_seed(91)
    x = torch.randn(n, 11, generator=g)
    z = x[:, :4].sum(1) + 0.5 * torch.randn(n, generator=g)
    y = torch.bucketize(z, torch.tensor([-2.0, -0.7, 0.7, 2.0]))
    return x, y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--seed", type=int, default=40)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)
    model = Ordinal()
    broadcast_state(model)
    params = list(model.parameters())
    opt = torch.optim.Adam(params, lr=4e-3)
    x, y = grades()
    for epoch in range(args.epochs):
        model.train()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed + epoch))[rank::world]
        s = torch.zeros(2)
        for idx in order.split(args.batch_size):
            target = (y[idx, None] > torch.arange(4)).float()
            loss = nn.functional.binary_cross_entropy_with_logits(model(x[idx]), target)
            opt.zero_grad()
            loss.backward()
            average(params)
            opt.step()
            s += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(s)
        if rank == 0:
            print(f"epoch {epoch}: loss {s[0] / s[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
