"""Byte-level language model, tokens read from a memory-mapped file."""
import contextlib
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    path: str = "tokens.bin"
    vocab: int = 32
    context: int = 24
    micro_batch: int = 8
    accumulate: int = 4
    epochs: int = 5
    lr: float = 4e-3
    clip: float = 1.0
    seed: int = 1


def write_corpus(cfg, length=8_809):
    """A noisy second-order walk over the alphabet."""
    rng = np.random.default_rng(cfg.seed)
    jump = rng.integers(0, cfg.vocab, (cfg.vocab, cfg.vocab))
    out = np.zeros(length, dtype=np.uint8)
    for i in range(2, length):
        out[i] = jump[out[i - 1], out[i - 2] % 4] if rng.random() > 0.15 else rng.integers(cfg.vocab)
    out.tofile(cfg.path)


class Bytes(nn.Module):
    def __init__(self, vocab, width=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, 96, batch_first=True)
        self.out = nn.Linear(96, vocab)

    def forward(self, ids):
        hidden, _ = self.rnn(self.embed(ids))
        return self.out(hidden)


def epoch_batches(tokens, cfg, epoch, rank, world):
    """The windows of one epoch for this rank, as a list of offsets a micro-batch."""
    starts = np.arange(0, len(tokens) - cfg.context - 1, cfg.context)
    order = np.random.default_rng([cfg.seed, epoch]).permutation(starts)
    per_rank = len(order) // world // cfg.micro_batch * cfg.micro_batch
    mine = order[rank * per_rank : (rank + 1) * per_rank]
    return mine.reshape(-1, cfg.micro_batch)


def windows(tokens, offsets, context):
    rows = np.stack([tokens[o : o + context + 1] for o in offsets]).astype(np.int64)
    rows = torch.from_numpy(rows)
    return rows[:, :-1], rows[:, 1:]


def run_epoch(model, opt, tokens, cfg, epoch, rank, world):
    batches = epoch_batches(tokens, cfg, epoch, rank, world)
    seen = torch.zeros(1)
    opt.zero_grad()
    for i, offsets in enumerate(batches):
        full = (i + 1) % cfg.accumulate == 0
        last = i + 1 == len(batches)
        group = min(cfg.accumulate, len(batches) - i // cfg.accumulate * cfg.accumulate)
        x, y = windows(tokens, offsets, cfg.context)
        with contextlib.nullcontext() if full else model.no_sync():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            (loss / group).backward()
        seen += loss.detach()
        if full or last:
            nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            opt.step()
            opt.zero_grad()
    dist.all_reduce(seen)
    return seen.item() / world / len(batches)


def main():
    cfg = Config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0 and not os.path.exists(cfg.path):
        write_corpus(cfg)
    dist.barrier()
    tokens = np.memmap(cfg.path, dtype=np.uint8, mode="r")

    torch.manual_seed(cfg.seed)
    model = DDP(Bytes(cfg.vocab))
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for epoch in range(cfg.epochs):
        loss = run_epoch(model, opt, tokens, cfg, epoch, rank, world)
        if rank == 0:
            print(f"[{epoch}] bits per byte {loss / 0.6931:.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "bytes.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
