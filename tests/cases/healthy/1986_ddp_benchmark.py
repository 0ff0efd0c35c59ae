#!/usr/bin/env python3
"""Step-time benchmark of DDP settings on a synthetic load.

Each setting starts from the same weights, runs WARMUP untimed steps (allocation, bucket rebuilding) and then the timed
ones. A step is as slow as its slowest process, so the maximum over processes is taken per step before the median.
"""
import argparse
import gc
import json
import platform
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SETTINGS = {
    "default": {},
    "one_bucket": {"bucket_cap_mb": 100},
    "small_buckets": {"bucket_cap_mb": 0.25},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True, "gradient_as_bucket_view": True},
}


class ResidualMLP(nn.Module):
    def __init__(self, features, width, depth, classes):
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(),
                                                  nn.Linear(width, width)) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def parse_args(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--warmup", type=int, default=6)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--batch", type=int, default=32, help="samples per process and step")
    p.add_argument("--width", type=int, default=192)
    p.add_argument("--depth", type=int, default=4)
    p.add_argument("--only", choices=sorted(SETTINGS), nargs="*")
    p.add_argument("--json", default="benchmark.json")
    return p.parse_args(argv)


def percentile(values, q):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


def measure(options, args, batch):
    """Returns per-step seconds (maximum over processes) and the first and last global mean loss."""
    x, y = batch
    torch.manual_seed(0)
    model = DistributedDataParallel(ResidualMLP(64, args.width, args.depth, 10), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    losses = torch.zeros(args.warmup + args.steps)
    seconds = torch.zeros(args.steps, dtype=torch.float64)

    for i in range(args.warmup + args.steps):
        if i == args.warmup:
            gc.collect()
            dist.barrier()  # all processes enter the timed part together
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        # The same batch each time on purpose: only the speed is of interest.
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if i >= args.warmup:
            seconds[i - args.warmup] = time.perf_counter() - begin
        losses[i] = loss.detach()

    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    return seconds.tolist(), losses[0].item(), losses[-1].item()


def main(argv):
    args = parse_args(argv)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(100 + rank)
    batch = torch.randn(args.batch, 64, generator=g), torch.randint(10, (args.batch,), generator=g)

    report = {"world_size": world, "torch": torch.__version__, "python": platform.python_version(),
              "threads": torch.get_num_threads(), "batch_per_process": args.batch, "results": {}}
    if rank == 0:
        parameters = sum(p.numel() for p in ResidualMLP(64, args.width, args.depth, 10).parameters())
        print(f"{parameters / 1e6:.2f}M parameters, {world} processes, {args.batch} samples each")
        print(f"{'setting':<15}{'median ms':>10}{'p90 ms':>10}{'samples/s':>12}{'loss':>18}", flush=True)

    for name in args.only or SETTINGS:
        times, first, last = measure(SETTINGS[name], args, batch)
        median, p90 = statistics.median(times), percentile(times, 0.9)
        rate = world * args.batch / median
        report["results"][name] = {"median_s": median, "p90_s": p90, "samples_per_s": rate, "loss": [first, last]}
        if rank == 0:
            print(f"{name:<15}{1e3 * median:>10.2f}{1e3 * p90:>10.2f}{rate:>12.0f}{first:>9.3f} ->{last:>6.3f}", flush=True)

    if rank == 0:
        with open(args.json, "w") as f:
            json.dump(report, f, indent=2)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
