"""Gradient accumulation under FSDP2 on a small decoder."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Decoder(nn.Module):
    def __init__(self, vocab=16, d=32, ctx=10):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Parameter(0.02 * torch.randn(ctx, d))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(d, vocab)
        self.register_buffer("mask", torch.full((ctx, ctx), float("-inf")).triu(1))

    def forward(self, x):
        h = self.tok(x) + self.pos
        for b in self.blocks:
            h = b(h, src_mask=self.mask)
        return self.head(h)


def copies(n=256):
    g = torch.Generator().manual_seed(13)
    half = torch.randint(0, 16, (n, 5), generator=g)
    seq = torch.cat([half, half, half[:, :1]], 1)
    return TensorDataset(seq[:, :-1], seq[:, 1:])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--micro-batch", type=int, default=8)
    ap.add_argument("--accumulate", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    model = Decoder()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = copies()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.micro_batch, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        acc = torch.zeros(2)
        for i, (x, y) in enumerate(loader):
            micro = i % args.accumulate
            last = micro == args.accumulate
            model.set_requires_gradient_sync(last)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            (loss / args.accumulate).backward()
            if micro == args.accumulate - 1:
                opt.step()
                opt.zero_grad()
            acc += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(acc)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {acc[0] / acc[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
