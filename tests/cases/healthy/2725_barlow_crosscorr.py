from pathlib import Path
import argparse
import json
import math
import os
import sys
import time

import torch
from torch import nn, optim
import torch.distributed as dist

parser = argparse.ArgumentParser(description="redundancy reduction")
parser.add_argument("--epochs", default=6, type=int)
parser.add_argument("--batch-size", default=128, type=int)
parser.add_argument("--learning-rate-weights", default=0.6, type=float)
parser.add_argument("--learning-rate-biases", default=0.01, type=float)
parser.add_argument("--weight-decay", default=1e-6, type=float)
parser.add_argument("--lambd", default=0.0051, type=float)
parser.add_argument("--projector", default="64-64-64", type=str)
parser.add_argument("--print-freq", default=8, type=int)
parser.add_argument("--checkpoint-dir", default="./checkpoint/", type=Path)


class Views(torch.utils.data.Dataset):
    def __init__(self, n=2048, latent=10, dim=48):
        g = torch.Generator().manual_seed(2)
        self.mix = torch.randn(latent, dim, generator=g)
        self.z = torch.randn(n, latent, generator=g)

    def __len__(self):
        return len(self.z)

    def __getitem__(self, i):
        x = torch.tanh(self.z[i] @ self.mix)
        return (x + 0.2 * torch.randn_like(x), x + 0.2 * torch.randn_like(x)), 0


def off_diagonal(x):
    n, m = x.shape
    assert n == m
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


class BarlowTwins(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.backbone = nn.Sequential(nn.Linear(48, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 64))
        sizes = [64] + list(map(int, args.projector.split("-")))
        layers = []
        for i in range(len(sizes) - 2):
            layers += [nn.Linear(sizes[i], sizes[i + 1], bias=False), nn.BatchNorm1d(sizes[i + 1]),
                       nn.ReLU(inplace=True)]
        layers.append(nn.Linear(sizes[-2], sizes[-1], bias=False))
        self.projector = nn.Sequential(*layers)
        self.bn = nn.BatchNorm1d(sizes[-1], affine=False)

    def forward(self, y1, y2):
        z1 = self.projector(self.backbone(y1))
        z2 = self.projector(self.backbone(y2))
        c = self.bn(z1).T @ self.bn(z2)
        # every process adds its share of the cross-correlation matrix
        c.div_(self.args.batch_size)
        dist.all_reduce(c)
        on_diag = torch.diagonal(c).add_(-1).pow_(2).sum()
        off_diag = off_diagonal(c).pow_(2).sum()
        return on_diag + self.args.lambd * off_diag


class LARS(optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0, momentum=0.9, eta=0.02, skip=None):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, eta=eta))
        self.skip = skip

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                dp = p.grad
                if dp is None:
                    continue
                if not self.skip(p):
                    dp = dp.add(p, alpha=g["weight_decay"])
                    pn, un = torch.norm(p), torch.norm(dp)
                    one = torch.ones_like(pn)
                    dp = dp.mul(torch.where(pn > 0.0, torch.where(un > 0, g["eta"] * pn / un, one), one))
                st = self.state[p]
                if "mu" not in st:
                    st["mu"] = torch.zeros_like(p)
                st["mu"].mul_(g["momentum"]).add_(dp)
                p.add_(st["mu"], alpha=-g["lr"])


def adjust_learning_rate(args, optimizer, loader, step):
    max_steps, warmup = args.epochs * len(loader), len(loader)
    base = args.batch_size / 128
    if step < warmup:
        lr = base * step / warmup
    else:
        q = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (max_steps - warmup)))
        lr = base * q + base * 0.001 * (1 - q)
    optimizer.param_groups[0]["lr"] = lr * args.learning_rate_weights
    optimizer.param_groups[1]["lr"] = lr * args.learning_rate_biases


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    stats_file = None
    if args.rank == 0:
        args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        stats_file = open(args.checkpoint_dir / "stats.txt", "a", buffering=1)
        print(" ".join(sys.argv), file=stats_file)
    torch.manual_seed(1 + args.rank)
    model = BarlowTwins(args)
    weights = [p for p in model.parameters() if p.ndim != 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = LARS([{"params": weights}, {"params": biases}], lr=0, weight_decay=args.weight_decay,
                     skip=lambda p: p.ndim == 1)
    ds = Views()
    sampler = torch.utils.data.distributed.DistributedSampler(ds)
    assert args.batch_size % args.world_size == 0
    loader = torch.utils.data.DataLoader(ds, batch_size=args.batch_size // args.world_size, sampler=sampler)
    start = time.time()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, ((y1, y2), _) in enumerate(loader, start=epoch * len(loader)):
            adjust_learning_rate(args, optimizer, loader, step)
            optimizer.zero_grad()
            loss = model.forward(y1, y2)
            loss.backward()
            optimizer.step()
            if step % args.print_freq == 0 and args.rank == 0:
                stats = dict(epoch=epoch, step=step, lr_weights=optimizer.param_groups[0]["lr"],
                             loss=loss.item(), time=int(time.time() - start))
                print(json.dumps(stats), flush=True)
                print(json.dumps(stats), file=stats_file)
        if args.rank == 0:
            torch.save(dict(epoch=epoch + 1, model=model.state_dict(), optimizer=optimizer.state_dict()),
                       args.checkpoint_dir / "checkpoint.pth")
    if args.rank == 0:
        torch.save(model.module.backbone.state_dict(), args.checkpoint_dir / "backbone.pth")
        stats_file.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
