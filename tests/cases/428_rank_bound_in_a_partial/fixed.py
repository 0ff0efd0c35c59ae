"""Multi-node capable starter: `python train.py --nodes 1 --node-rank 0 --per-node 2`."""
import argparse
import functools
import os
import random

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def entry(local_rank, first_rank, world, args):
    rank = first_rank + local_rank
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(local_rank)
    store_url = f"tcp://{args.master}:{args.port}"
    dist.init_process_group("gloo", init_method=store_url, rank=rank, world_size=world)
    try:
        train(rank, world, args)
    finally:
        dist.destroy_process_group()


def train(rank, world, args):
    torch.manual_seed(args.seed)
    model = DDP(nn.GRUCell(3, 24))
    readout = DDP(nn.Linear(24, 1))
    opt = torch.optim.Adam([*model.parameters(), *readout.parameters()], lr=5e-3)
    gen = torch.Generator().manual_seed(args.seed + 1 + rank)
    for step in range(args.steps):
        x = torch.randn(32, 6, 3, generator=gen)
        h = torch.zeros(32, 24)
        h = model(x[:, 0], h)
        loss = nn.functional.mse_loss(readout(h).squeeze(1), x[:, 0].mean(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"{world} processes, loss {mean.item() / world:.5f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--nodes", type=int, default=1)
    ap.add_argument("--node-rank", type=int, default=0)
    ap.add_argument("--per-node", type=int, default=2)
    ap.add_argument("--master", default="127.0.0.1")
    ap.add_argument("--port", type=int, default=random.Random(os.getpid()).randint(20000, 30000))
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--seed", type=int, default=3)
    args = ap.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    first = args.node_rank * args.per_node
    start = functools.partial(entry, first_rank=first, world=args.nodes * args.per_node, args=args)
    mp.start_processes(start, nprocs=args.per_node, start_method="fork")


if __name__ == "__main__":
    main()
