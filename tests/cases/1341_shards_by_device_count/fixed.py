"""Streams pre-tokenised shards from disk and trains an embedding model for a fixed number of steps."""
import argparse
import itertools
import pathlib
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

VOCAB = 60


def write_shards(folder, count, rows):
    folder.mkdir(exist_ok=True)
    g = torch.Generator().manual_seed(55)
    for k in range(count):
        first = torch.randint(0, VOCAB, (rows,), generator=g)
        jump = torch.randint(1, 4, (rows,), generator=g)
        tokens = (first[:, None] + jump[:, None] * torch.arange(5)) % VOCAB
        torch.save(tokens, folder / f"shard_{k:03d}.pt")


class Stream(IterableDataset):
    def __init__(self, folder, rank):
        files = sorted(folder.glob("shard_*.pt"))
        self.files = files[rank :: dist.get_world_size()]
        self.epoch = 0

    def __iter__(self):
        order = list(self.files)
        rng = random.Random(self.epoch)
        rng.shuffle(order)
        for path in order:
            tokens = torch.load(path)
            rows = list(range(len(tokens)))
            rng.shuffle(rows)
            for i in rows:
                yield tokens[i, :4], tokens[i, 4]


class Continue(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.mlp = nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, VOCAB))

    def forward(self, tokens):
        return self.mlp(self.embed(tokens).flatten(1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", type=pathlib.Path, default=pathlib.Path("shards"))
    ap.add_argument("--shards", type=int, default=8)
    ap.add_argument("--rows", type=int, default=60)
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=24)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_shards(args.data, args.shards, args.rows)
    dist.barrier()

    torch.manual_seed(0)
    stream = Stream(args.data, rank)
    loader = DataLoader(stream, batch_size=args.batch_size)
    model = DDP(Continue())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    steps = args.shards * args.rows // (args.batch_size * world)
    for epoch in range(args.epochs):
        stream.epoch = epoch
        for context, target in itertools.islice(loader, steps):
            loss = nn.functional.cross_entropy(model(context), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: {steps} steps, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
