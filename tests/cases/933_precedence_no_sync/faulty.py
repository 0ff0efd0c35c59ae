"""Character language model; small batches are accumulated before each update."""
import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

TEXT = ("the quick brown fox jumps over the lazy dog while seven wizards mix jade potions by the old quay; " * 40)
ALPHABET = sorted(set(TEXT))


class CharLM(nn.Module):
    def __init__(self, n_sym, width=32, context=16):
        super().__init__()
        self.tok = nn.Embedding(n_sym, width)
        self.pos = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, n_sym)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, ids):
        return self.out(self.body(self.tok(ids) + self.pos, mask=self.mask))


def windows(context):
    ids = torch.tensor([ALPHABET.index(c) for c in TEXT])
    return ids.unfold(0, context + 1, 7)


def epoch_indices(n, epoch, rank, world, seed):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
    usable = n // world * world
    return order[rank:usable:world]


def sync_context(model, i, accum):
    if i + 1 % accum == 0:
        return nullcontext()
    return model.no_sync()


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    data = windows(args.context)
    model = DDP(CharLM(len(ALPHABET), context=args.context))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        mine = data[epoch_indices(len(data), epoch, rank, world, args.seed)]
        batches = [b for b in mine.split(args.batch) if len(b) == args.batch]
        batches = batches[: len(batches) // args.accum * args.accum]
        running = torch.zeros(())
        for i, batch in enumerate(batches):
            with sync_context(model, i, args.accum):
                logits = model(batch[:, :-1])
                loss = loss_fn(logits.flatten(0, 1), batch[:, 1:].flatten()) / args.accum
                loss.backward()
            running += loss.detach()
            if (i + 1) % args.accum == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
        running /= len(batches) // args.accum
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch} nll {running.item() / world:.4f}")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--context", type=int, default=16)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    train(args)
    dist.destroy_process_group()
