"""ZeRO-2 by hand: one flat parameter buffer, gradients reduce-scattered, each rank keeps fp32 master weights and Adam moments of its slice, all_gather back."""
import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class FlatModel:
    def __init__(self, module, world):
        self.module = module
        params = list(module.parameters())
        n = sum(p.numel() for p in params)
        self.padded = math.ceil(n / world) * world
        self.data = torch.zeros(self.padded)
        self.grad = torch.zeros(self.padded)
        at = 0
        for p in params:
            self.data[at : at + p.numel()].copy_(p.data.flatten())
            p.data = self.data[at : at + p.numel()].view_as(p)
            p.grad = self.grad[at : at + p.numel()].view_as(p)
            at += p.numel()


class ShardedAdamW:
    def __init__(self, flat, rank, world, lr, betas=(0.9, 0.95), eps=1e-8, wd=0.01):
        self.flat, self.rank, self.world = flat, rank, world
        self.lr, self.b1, self.b2, self.eps, self.wd = lr, *betas, eps, wd
        k = flat.padded // world
        self.mine = slice(rank * k, (rank + 1) * k)
        self.master = flat.data[self.mine].clone()
        self.m, self.v, self.t = torch.zeros(k), torch.zeros(k), 0
        self.shard_grad = torch.empty(k)

    @torch.no_grad()
    def step(self, max_norm=1.0):
        dist.reduce_scatter(self.shard_grad, list(self.flat.grad.chunk(self.world)), op=dist.ReduceOp.SUM)
        self.shard_grad.div_(self.world)
        sq = self.shard_grad.pow(2).sum()
        dist.all_reduce(sq)
        norm = sq.sqrt()
        self.shard_grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        self.t += 1
        self.m.lerp_(self.shard_grad, 1 - self.b1)
        self.v.lerp_(self.shard_grad.square(), 1 - self.b2)
        upd = (self.m / (1 - self.b1**self.t)) / ((self.v / (1 - self.b2**self.t)).sqrt() + self.eps)
        self.master.mul_(1 - self.lr * self.wd).sub_(upd, alpha=self.lr)
        dist.all_gather(list(self.flat.data.chunk(self.world)), self.master)
        return norm.item()

    def zero_grad(self):
        self.flat.grad.zero_()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))
    flat = FlatModel(net, world)
    dist.broadcast(flat.data, 0)
    opt = ShardedAdamW(flat, rank, world, args.lr)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(480, 16, generator=g)
    y = (x @ torch.randn(16, 3, generator=g)).argmax(1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for xb, yb in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(xb), yb)
            loss.backward()
            norm = opt.step()
            total += torch.tensor([loss.item() * len(xb), len(xb)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}, last gradient norm {norm:.3f}")
    torch.save({"t": opt.t, "m": opt.m, "v": opt.v, "master": opt.master}, f"/tmp/zero2_{os.getppid()}_rank{rank}.pt")
    if rank == 0:
        torch.save(net.state_dict(), f"/tmp/zero2_{os.getppid()}_model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
