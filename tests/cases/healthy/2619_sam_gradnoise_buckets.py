"""Sharpness-aware minimisation; gradients reduced in buckets by async handles, annealed noise shared by all ranks."""
import argparse
import os
import pickle

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def write_shards(folder, shards=6, rows=400):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((10, 5))
    os.makedirs(folder, exist_ok=True)
    for s in range(shards):
        x = rng.standard_normal((rows, 10))
        y = (np.tanh(x) @ w + np.sin(2 * x[:, :5])).argmax(1)
        if s % 2:
            np.savez(f"{folder}/{s}.npz", x=x.astype("f4"), y=y)
        else:
            with open(f"{folder}/{s}.pkl", "wb") as f:
                pickle.dump({"x": x.astype("f4"), "y": y}, f)


def read_shards(folder):
    xs, ys = [], []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.endswith(".npz"):
            with np.load(path) as z:
                part = {"x": z["x"], "y": z["y"]}
        else:
            with open(path, "rb") as f:
                part = pickle.load(f)
        xs.append(part["x"])
        ys.append(part["y"])
    return torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys))


class Buckets:
    """Flattens gradients into buckets of at most `limit` numbers, one asynchronous sum for each."""

    def __init__(self, params, limit=4096):
        self.groups, size = [[]], 0
        for p in reversed(list(params)):
            if size + p.numel() > limit and self.groups[-1]:
                self.groups.append([])
                size = 0
            self.groups[-1].append(p)
            size += p.numel()
        self.flat = [torch.zeros(sum(p.numel() for p in g)) for g in self.groups]

    def reduce(self):
        work = []
        for g, flat in zip(self.groups, self.flat):
            torch.cat([p.grad.flatten() for p in g], out=flat)
            work.append(dist.all_reduce(flat, async_op=True))
        for g, flat, w in zip(self.groups, self.flat, work):
            w.wait()
            flat /= dist.get_world_size()
            for p, part in zip(g, flat.split([p.numel() for p in g])):
                p.grad.copy_(part.view_as(p))


class SAM:
    def __init__(self, params, base, rho):
        self.params, self.base, self.rho, self.moved = params, base, rho, None

    @torch.no_grad()
    def climb(self):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm() + 1e-12
        self.moved = [p.grad * (self.rho / norm) for p in self.params]
        for p, e in zip(self.params, self.moved):
            p += e

    @torch.no_grad()
    def descend(self):
        for p, e in zip(self.params, self.moved):
            p -= e
        self.base.step()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=7)
    ap.add_argument("--rho", type=float, default=0.05)
    ap.add_argument("--noise", type=float, default=0.002)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_shards("table")
    dist.barrier()
    x, y = read_shards("table")
    x, y, vx, vy = x[:2000], y[:2000], x[2000:], y[2000:]
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(10, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 5))
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    params = list(net.parameters())
    buckets = Buckets(params)
    sam = SAM(params, torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True), args.rho)
    common = torch.Generator().manual_seed(77)
    step = 0
    for epoch in range(args.epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))[rank::world]
        total = torch.zeros(2)
        for idx in order.split(40):
            keep = torch.get_rng_state()
            loss = F.cross_entropy(net(x[idx]), y[idx])
            net.zero_grad()
            loss.backward()
            buckets.reduce()
            sam.climb()
            torch.set_rng_state(keep)          # the same dropout mask on both passes
            second = F.cross_entropy(net(x[idx]), y[idx])
            net.zero_grad()
            second.backward()
            buckets.reduce()
            std = args.noise / (1 + step) ** 0.3
            for p in params:
                p.grad.add_(torch.randn(p.shape, generator=common), alpha=std)
            sam.descend()
            step += 1
            total += torch.tensor([loss.item() * len(idx), len(idx)])
        dist.all_reduce(total)
        net.eval()
        with torch.no_grad():
            hits = (net(vx[rank::world]).argmax(1) == vy[rank::world]).float()
        net.train()
        acc = torch.stack([hits.sum(), torch.tensor(float(len(hits)))])
        dist.all_reduce(acc)
        if rank == 0:
            print(f"epoch {epoch} loss {total[0] / total[1]:.3f} acc {acc[0] / acc[1]:.3f} buckets {len(buckets.groups)}", flush=True)
    flat = nn.utils.parameters_to_vector(params).detach()
    low, high = flat.clone(), flat.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    assert torch.equal(low, high)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
