"""Accumulate over micro-batches with a small helper object."""
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Accumulator:
    """with acc.micro_step(model): forward, backward; then `if acc.ready:` step"""

    def __init__(self, every):
        self.every = every
        self._seen = 0

    @property
    def boundary(self):
        return self._seen == self.every

    @property
    def ready(self):
        done = self.boundary
        if done:
            self._seen = 0
        return done

    @contextlib.contextmanager
    def micro_step(self, model):
        sync = self.boundary
        self._seen += 1
        with contextlib.nullcontext() if sync else model.no_sync():
            yield 1.0 / self.every


class Tagger(nn.Module):
    def __init__(self, vocab=40, dim=16, tags=5):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * dim, tags)

    def forward(self, words):
        return self.out(self.lstm(self.emb(words))[0])


def sentences(seed, batch=8, length=10):
    g = torch.Generator().manual_seed(seed)
    while True:
        w = torch.randint(1, 40, (batch, length), generator=g)
        left = torch.cat([torch.zeros(batch, 1, dtype=torch.long), w[:, :-1]], 1)
        yield w, (w % 5 + (left > 20).long()) % 5


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    model = DistributedDataParallel(Tagger())
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    acc = Accumulator(every=int(os.environ.get("ACCUMULATE", 3)))
    updates = 0
    for words, tags in sentences(70 + rank):
        with acc.micro_step(model) as scale:
            logits = model(words)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tags.flatten())
            (loss * scale).backward()
        if acc.ready:
            opt.step()
            opt.zero_grad()
            updates += 1
            if updates % 10 == 0:
                avg = loss.detach().clone()
                dist.all_reduce(avg)
                if rank == 0:
                    print(f"update {updates}: loss {avg.item() / dist.get_world_size():.3f}")
        if updates == 30:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
