# Barlow Twins after facebookresearch/barlowtwins main.py: spawned workers, LARS, cross-correlation all-reduced inside the loss.
import argparse
import json
import math
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim

parser = argparse.ArgumentParser(description="Barlow Twins Training")
parser.add_argument("--epochs", default=4, type=int)
parser.add_argument("--batch-size", default=64, type=int, help="global")
parser.add_argument("--learning-rate-weights", default=0.2, type=float)
parser.add_argument("--learning-rate-biases", default=0.0048, type=float)
parser.add_argument("--weight-decay", default=1e-6, type=float)
parser.add_argument("--lambd", default=0.0051, type=float)
parser.add_argument("--projector", default="32-32-32", type=str)
parser.add_argument("--print-freq", default=4, type=int)


def main():
    args = parser.parse_args()
    args.ngpus_per_node = 2
    args.rank = 0
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    args.dist_url = f"tcp://localhost:{port}"
    args.world_size = args.ngpus_per_node
    args.checkpoint_dir = Path(tempfile.mkdtemp())
    mp.spawn(main_worker, (args,), args.ngpus_per_node)


class Views(torch.utils.data.Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(3)
        self.base = torch.randn(n, 1, 8, 8, generator=g)

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        x = self.base[i]
        y1 = x + 0.3 * torch.randn_like(x)
        y2 = x.flip(-1) + 0.3 * torch.randn_like(x)
        return (y1, y2), i


def main_worker(gpu, args):
    args.rank += gpu
    torch.distributed.init_process_group(backend="gloo", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    if args.rank == 0:
        args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        stats_file = open(args.checkpoint_dir / "stats.txt", "a", buffering=1)
        print(" ".join(sys.argv[:1]))
        print(" ".join(sys.argv[:1]), file=stats_file)

    torch.manual_seed(100 + args.rank)
    model = BarlowTwins(args)
    param_weights, param_biases = [], []
    for param in model.parameters():
        (param_biases if param.ndim == 1 else param_weights).append(param)
    parameters = [{"params": param_weights}, {"params": param_biases}]
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = LARS(parameters, lr=0, weight_decay=args.weight_decay, weight_decay_filter=True, lars_adaptation_filter=True)

    start_epoch = 0
    dataset = Views()
    sampler = torch.utils.data.distributed.DistributedSampler(dataset)
    assert args.batch_size % args.world_size == 0
    per_device = args.batch_size // args.world_size
    loader = torch.utils.data.DataLoader(dataset, batch_size=per_device, sampler=sampler)
    start_time = time.time()
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for step, ((y1, y2), _) in enumerate(loader, start=epoch * len(loader)):
            adjust_learning_rate(args, optimizer, loader, step)
            optimizer.zero_grad()
            loss = model.forward(y1, y2)
            loss.backward()
            optimizer.step()
            if step % args.print_freq == 0:
                if args.rank == 0:
                    stats = dict(epoch=epoch, step=step, lr_weights=optimizer.param_groups[0]["lr"], loss=loss.item(), time=int(time.time() - start_time))
                    print(json.dumps(stats))
                    print(json.dumps(stats), file=stats_file)
        if args.rank == 0:
            state = dict(epoch=epoch + 1, model=model.state_dict(), optimizer=optimizer.state_dict())
            torch.save(state, args.checkpoint_dir / "checkpoint.pth")
    if args.rank == 0:
        torch.save(model.module.backbone.state_dict(), args.checkpoint_dir / "resnet50.pth")
    dist.destroy_process_group()


def adjust_learning_rate(args, optimizer, loader, step):
    max_steps = args.epochs * len(loader)
    warmup_steps = len(loader)
    base_lr = args.batch_size / 64
    if step < warmup_steps:
        lr = base_lr * step / warmup_steps
    else:
        step -= warmup_steps
        max_steps -= warmup_steps
        q = 0.5 * (1 + math.cos(math.pi * step / max_steps))
        lr = base_lr * q + base_lr * 0.001 * (1 - q)
    optimizer.param_groups[0]["lr"] = lr * args.learning_rate_weights
    optimizer.param_groups[1]["lr"] = lr * args.learning_rate_biases


def off_diagonal(x):
    n, m = x.shape
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


class BarlowTwins(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        sizes = [128] + list(map(int, args.projector.split("-")))
        layers = []
        for i in range(len(sizes) - 2):
            layers += [nn.Linear(sizes[i], sizes[i + 1], bias=False), nn.BatchNorm1d(sizes[i + 1]), nn.ReLU(inplace=True)]
        layers.append(nn.Linear(sizes[-2], sizes[-1], bias=False))
        self.projector = nn.Sequential(*layers)
        self.bn = nn.BatchNorm1d(sizes[-1], affine=False)

    def forward(self, y1, y2):
        z1, z2 = self.projector(self.backbone(y1)), self.projector(self.backbone(y2))
        c = self.bn(z1).T @ self.bn(z2)
        c.div_(self.args.batch_size)
        torch.distributed.all_reduce(c)
        on_diag = torch.diagonal(c).add_(-1).pow_(2).sum()
        off_diag = off_diagonal(c).pow_(2).sum()
        return on_diag + self.args.lambd * off_diag


class LARS(optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0, momentum=0.9, eta=0.001, weight_decay_filter=False, lars_adaptation_filter=False):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, eta=eta,
                                      weight_decay_filter=weight_decay_filter, lars_adaptation_filter=lars_adaptation_filter))

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                dp = p.grad
                if dp is None:
                    continue
                if not g["weight_decay_filter"] or p.ndim != 1:
                    dp = dp.add(p, alpha=g["weight_decay"])
                if not g["lars_adaptation_filter"] or p.ndim != 1:
                    pn, un = torch.norm(p), torch.norm(dp)
                    one = torch.ones_like(pn)
                    q = torch.where(pn > 0.0, torch.where(un > 0, g["eta"] * pn / un, one), one)
                    dp = dp.mul(q)
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                mu = state["mu"]
                mu.mul_(g["momentum"]).add_(dp)
                p.add_(mu, alpha=-g["lr"])


if __name__ == "__main__":
    main()
