"""Small attention classifier; gradients are exchanged without DDP."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Brackets(Dataset):
    """Strings of two symbols; the label says which of them comes first more often."""

    def __init__(self, n=320, length=12):
        g = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, 6, (n, length), generator=g)
        self.label = ((self.tokens == 0).sum(1) > (self.tokens == 1).sum(1)).long()

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.tokens[i], self.label[i]


class TinyFormer(nn.Module):
    def __init__(self, width=32, heads=4, p=0.1):
        super().__init__()
        self.tok = nn.Embedding(6, width)
        self.pos = nn.Parameter(0.02 * torch.randn(12, width))
        self.attn = nn.MultiheadAttention(width, heads, dropout=p, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(p), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens):
        h = self.tok(tokens) + self.pos
        a = self.norm1(h)
        h = h + self.attn(a, a, a, need_weights=False)[0]
        h = h + self.mlp(self.norm2(h))
        return self.head(h.mean(1))


class Runner:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed + self.rank)  # other dropout masks on every process
        self.model = TinyFormer()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        data = Brackets()
        self.sampler = DistributedSampler(data, seed=args.seed)
        self.loader = DataLoader(data, batch_size=args.batch_size, sampler=self.sampler)

    def exchange(self):
        grads = [p.grad for p in self.model.parameters()]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        flat /= self.world
        offset = 0
        for g in grads:
            g.copy_(flat[offset : offset + g.numel()].view_as(g))
            offset += g.numel()

    def epoch(self, number):
        self.sampler.set_epoch(number)
        stats = torch.zeros(3)
        for tokens, label in self.loader:
            out = self.model(tokens)
            loss = F.cross_entropy(out, label)
            self.opt.zero_grad()
            loss.backward()
            self.exchange()
            self.opt.step()
            stats += torch.tensor([loss.item() * len(label), (out.argmax(1) == label).sum().item(), len(label)])
        dist.all_reduce(stats)
        if self.rank == 0:
            print(f"epoch {number}: loss {(stats[0] / stats[2]).item():.4f} acc {(stats[1] / stats[2]).item():.3f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    runner = Runner(args)
    for number in range(args.epochs):
        runner.epoch(number)
    if runner.rank == 0:
        torch.save(runner.model.state_dict(), "tinyformer.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
