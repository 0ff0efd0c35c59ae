"""Character language model with gradient accumulation and clipping."""
import contextlib
import math
import sys
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Settings:
    seq: int = 32
    micro_batch: int = 6
    accumulate: int = 4
    updates: int = 60
    lr: float = 4e-3
    max_norm: float = 0.12
    hidden: int = 96
    seed: int = 31
    words: list = field(default_factory=lambda: "the quick brown fox jumps over a lazy dog near cold water".split())


class CharModel(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, 32)
        self.rnn = nn.GRU(32, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def make_text(cfg, length=20000):
    g = torch.Generator().manual_seed(1)
    picks = torch.randint(0, len(cfg.words), (length // 4,), generator=g).tolist()
    text = " ".join(cfg.words[i] for i in picks)[:length]
    chars = sorted(set(text))
    lookup = {c: i for i, c in enumerate(chars)}
    return torch.tensor([lookup[c] for c in text]), len(chars)


def micro_batches(tokens, cfg, rank):
    """Endless random windows; each rank draws its own."""
    g = torch.Generator().manual_seed(cfg.seed * 100 + rank)
    while True:
        start = torch.randint(0, len(tokens) - cfg.seq - 1, (cfg.micro_batch,), generator=g)
        window = torch.stack([tokens[s : s + cfg.seq + 1] for s in start.tolist()])
        yield window[:, :-1], window[:, 1:]


def updates(model, optimizer, stream, cfg):
    """Yields (loss, gradient norm) after each optimizer step."""
    while True:
        optimizer.zero_grad()
        total = 0.0
        for k in range(cfg.accumulate):
            x, y = next(stream)
            last = k == cfg.accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / cfg.accumulate
                loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.max_norm)
        optimizer.step()
        yield total, norm.item()


def main():
    cfg = Settings()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    tokens, vocab = make_text(cfg)
    model = DistributedDataParallel(CharModel(vocab, cfg.hidden))
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)

    model.train()
    running = 0.0
    for step, (loss, norm) in enumerate(updates(model, optimizer, micro_batches(tokens, cfg, rank), cfg), start=1):
        running += loss
        if step % 15 == 0:
            mean = torch.tensor(running / 15)
            dist.all_reduce(mean)
            mean /= world
            if rank == 0:
                sys.stdout.write(f"update {step} nll {mean:.3f} ppl {math.exp(mean):.2f} norm {norm:.2f}\n")
                sys.stdout.flush()
            running = 0.0
        if step == cfg.updates:
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
