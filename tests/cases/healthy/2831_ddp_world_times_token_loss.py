import contextlib
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

IGNORE = -100


@dataclass
class Conf:
    vocab: int = 32
    width: int = 64
    micro: int = 12
    accum: int = 3
    steps: int = 90
    lr: float = 3e-3


class Instructions:
    """prompt of random length + answer (copy of a part of the prompt); only the answer is supervised."""

    def __init__(self, seed, vocab):
        self.g, self.vocab = torch.Generator().manual_seed(seed), vocab

    def sample(self):
        n = int(torch.randint(3, 9, (1,), generator=self.g))
        k = int(torch.randint(1, n + 1, (1,), generator=self.g))
        prompt = torch.randint(3, self.vocab, (n,), generator=self.g)
        ids = torch.cat([prompt, torch.tensor([1]), prompt[:k], torch.tensor([2])])
        labels = ids.clone()
        labels[:n + 1] = IGNORE
        return ids, labels

    def batch(self, n):
        rows = [self.sample() for _ in range(n)]
        ids = nn.utils.rnn.pad_sequence([r[0] for r in rows], batch_first=True, padding_value=0)
        lab = nn.utils.rnn.pad_sequence([r[1] for r in rows], batch_first=True, padding_value=IGNORE)
        return ids, lab


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab, c.width)
        self.rnn = nn.LSTM(c.width, c.width, batch_first=True)
        self.q, self.k = nn.Linear(c.width, c.width), nn.Linear(c.width, c.width)
        self.out = nn.Linear(2 * c.width, c.vocab)

    def forward(self, ids, labels, denom):
        e = self.emb(ids)
        h, _ = self.rnn(e)
        t = ids.shape[1]
        att = (self.q(h) @ self.k(h).transpose(1, 2)) / h.shape[-1] ** 0.5
        att = att.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
        logits = self.out(torch.cat([h, att @ e], -1))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum") / denom


def num_items(batches):
    n = torch.tensor([sum((lab[:, 1:] != IGNORE).sum().item() for _, lab in batches)])
    dist.all_reduce(n)
    return n.item()


def main():
    c = Conf()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(33)
    model = DDP(Decoder(c))
    opt = torch.optim.AdamW(model.parameters(), lr=c.lr)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10) * max(0.1, 1 - s / c.steps))
    data = Instructions(70 + rank, c.vocab)
    for step in range(1, c.steps + 1):
        batches = [data.batch(c.micro) for _ in range(c.accum)]
        denom = num_items(batches)
        opt.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for i, (ids, lab) in enumerate(batches):
            last = i == len(batches) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(ids, lab, denom)
                (loss * world).backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % 30 == 0:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step} loss {total.item():.4f} items {denom} norm {norm.item():.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(os.getcwd(), "sft.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
