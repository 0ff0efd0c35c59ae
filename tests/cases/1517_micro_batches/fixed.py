"""Language-model style training with many micro batches in every update."""
import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Phrases(Dataset):
    def __init__(self, n=640, vocab=6000, length=8):
        self.n, self.vocab, self.length = n, vocab, length

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return (53 * i + 11 * torch.arange(self.length + 1)) % self.vocab


class LanguageModel(nn.Module):
    def __init__(self, vocab=6000, dim=160):
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens):
        return self.out(self.rnn(self.tokens(tokens))[0])


class Accumulator:
    """Collects the gradients of several micro batches and makes one update."""

    def __init__(self, model, opt, count):
        self.model, self.opt, self.count = model, opt, count
        self.seen = 0

    def forward(self, seq):
        logits = self.model(seq[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), seq[:, 1:].flatten())

    def feed(self, seq):
        self.seen += 1
        final = self.seen % self.count == 0
        with contextlib.nullcontext() if final else self.model.no_sync():
            loss = self.forward(seq)
            (loss / self.count).backward()
        if final:
            self.opt.step()
            self.opt.zero_grad(set_to_none=False)
        return loss.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--micro-batch", type=int, default=2)
    ap.add_argument("--accumulate", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DDP(LanguageModel())
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    accumulator = Accumulator(model, opt, args.accumulate)
    data = Phrases()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.micro_batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        started, total = time.perf_counter(), torch.zeros(1)
        for seq in loader:
            total += accumulator.feed(seq)
        dist.all_reduce(total)
        if rank == 0:
            took = time.perf_counter() - started
            print(f"epoch {epoch}: loss {total.item() / (world * len(loader)):.3f}, {took:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
