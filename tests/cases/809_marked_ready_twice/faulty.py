"""Residual token mixer with activation checkpointing to save memory."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def copies(n=160, length=8, vocab=12):
    g = torch.Generator().manual_seed(95)
    tokens = torch.randint(0, vocab, (n, length), generator=g)
    return TensorDataset(tokens, tokens.roll(1, dims=1))


class Mixer(nn.Module):
    def __init__(self, dim, length):
        super().__init__()
        self.tokens = nn.Linear(length, length)
        self.channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, h):
        h = h + self.tokens(h.transpose(1, 2)).transpose(1, 2)
        return h + self.channels(h)


class Model(nn.Module):
    def __init__(self, vocab=12, dim=20, length=8, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Mixer(dim, length) for _ in range(depth))
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens):
        h = self.embed(tokens)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return self.out(h)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)

    model = DDP(Model(), find_unused_parameters=True)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = copies()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for tokens, target in loader:
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
