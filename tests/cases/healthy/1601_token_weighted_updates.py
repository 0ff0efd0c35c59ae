"""Masked sequence model: every update collects several micro batches with different token counts."""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD = -100


class Sentences(Dataset):
    def __init__(self, n=384, longest=20, vocab=40):
        g = torch.Generator().manual_seed(26)
        self.size = torch.randint(4, longest + 1, (n,), generator=g)
        start = torch.randint(0, vocab, (n, 1), generator=g)
        self.text = (start + 3 * torch.arange(longest + 1)) % vocab

    def __len__(self):
        return len(self.size)

    def __getitem__(self, i):
        target = self.text[i, 1:].clone()
        target[self.size[i] :] = PAD
        return self.text[i, :-1], target


class Model(nn.Module):
    def __init__(self, vocab=40, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, text):
        return self.out(self.rnn(self.embed(text))[0])


def groups(loader, size):
    group = []
    for batch in loader:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []


def update(model, opt, group, world):
    tokens = torch.tensor(float(sum((target != PAD).sum() for _, target in group)))
    dist.all_reduce(tokens)
    opt.zero_grad()
    total = 0.0
    for k, (text, target) in enumerate(group):
        with contextlib.nullcontext() if k == len(group) - 1 else model.no_sync():
            loss = F.cross_entropy(model(text).flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
            (loss * world / tokens).backward()
        total += loss.item()
    opt.step()
    return total, tokens.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--accumulate", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DDP(Model())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = Sentences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss, tokens = torch.zeros(1), 0.0
        for group in groups(loader, args.accumulate):
            part, count = update(model, opt, group, world)
            loss += part
            tokens += count
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch}: loss per token {loss.item() / tokens:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
