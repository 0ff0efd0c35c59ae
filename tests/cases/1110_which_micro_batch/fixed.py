"""Tiny causal transformer with gradient accumulation."""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Arithmetic(Dataset):
    """Sequences a, a+d, a+2d, ... modulo a prime."""

    def __init__(self, n=512, length=10, prime=23):
        g = torch.Generator().manual_seed(44)
        start = torch.randint(0, prime, (n, 1), generator=g)
        step = torch.randint(1, 5, (n, 1), generator=g)
        self.seq = (start + step * torch.arange(length + 1)) % prime

    def __len__(self):
        return len(self.seq)

    def __getitem__(self, i):
        return self.seq[i, :-1], self.seq[i, 1:]


class GPT(nn.Module):
    def __init__(self, vocab=23, dim=32, length=10, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(length, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab)

    def forward(self, idx):
        t = idx.shape[1]
        mask = torch.full((t, t), float("-inf")).triu(1)
        return self.head(self.blocks(self.tok(idx) + self.pos[:t], mask=mask))


def train_epoch(model, loader, optimizer, accum):
    total = torch.zeros(2)
    for i, (idx, target) in enumerate(loader):
        sync = contextlib.nullcontext() if (i + 1) % accum == 0 else model.no_sync()
        with sync:
            logits = model(idx)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
            (loss / accum).backward()
        if (i + 1) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
        total += torch.tensor([loss.item(), 1.0])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--micro-batch", type=int, default=8)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Arithmetic()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.micro_batch, sampler=sampler)
    model = DDP(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, args.accum)
        if int(os.environ["RANK"]) == 0:
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
