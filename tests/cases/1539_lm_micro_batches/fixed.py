"""Tiny language model; a large batch is made of micro batches."""
import argparse
import contextlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sequences(Dataset):
    """Arithmetic sequences modulo the vocabulary."""

    def __init__(self, n=640, vocab=2000, length=9):
        g = torch.Generator().manual_seed(4)
        start = torch.randint(0, vocab, (n, 1), generator=g)
        stride = torch.randint(1, 4, (n, 1), generator=g)
        self.ids = (start + stride * torch.arange(length)) % vocab

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i, :-1], self.ids[i, 1:]


class TinyLM(nn.Module):
    def __init__(self, vocab=2000, width=96):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.place = nn.Parameter(torch.zeros(8, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 192, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, vocab)
        self.register_buffer("mask", torch.triu(torch.full((8, 8), float("-inf")), 1))

    def forward(self, ids):
        return self.out(self.block(self.tokens(ids) + self.place, src_mask=self.mask))


class Accumulator:
    def __init__(self, model, opt, micro_steps):
        self.model, self.opt, self.micro_steps = model, opt, micro_steps
        self.count = 0

    def context(self):
        """Gradients travel only with the last micro batch."""
        last = (self.count + 1) % self.micro_steps == 0
        return contextlib.nullcontext() if last else self.model.no_sync()

    def step(self, ids, target):
        with self.context():
            logits = self.model(ids)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
            (loss / self.micro_steps).backward()
        self.count += 1
        if self.count % self.micro_steps == 0:
            self.opt.step()
            self.opt.zero_grad()
        return loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--micro-batch", type=int, default=4)
    ap.add_argument("--micro-steps", type=int, default=8)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(TinyLM())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = Sequences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.micro_batch, sampler=sampler)
    acc = Accumulator(model, opt, args.micro_steps)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        for ids, target in loader:
            loss = acc.step(ids, target)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f} in {time.perf_counter() - begin:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
