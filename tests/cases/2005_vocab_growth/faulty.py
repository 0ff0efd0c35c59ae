"""Language model with LayerDrop: trained on letters first, then the vocabulary grows and training goes on with digits."""
import argparse
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

LETTERS, DIGITS, CONTEXT = 26, 10, 16


class Sentences:
    """Endless batches of counting sentences; each rank owns a stream of its own."""

    def __init__(self, symbols, batch, stream):
        self.symbols, self.batch = symbols, batch
        self.gen = torch.Generator().manual_seed(stream)

    def __iter__(self):
        while True:
            start = torch.randint(0, self.symbols, (self.batch, 1), generator=self.gen)
            stride = torch.randint(1, 4, (self.batch, 1), generator=self.gen)
            ids = (start + stride * torch.arange(CONTEXT + 1)) % self.symbols
            noise = torch.randint(0, self.symbols, ids.shape, generator=self.gen)
            yield torch.where(torch.rand(ids.shape, generator=self.gen) < 0.05, noise, ids)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Writer(nn.Module):
    def __init__(self, vocab, d=48, layers=4, layerdrop=0.15, drop_seed=0):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT, d))
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.layerdrop, self.coin = layerdrop, random.Random(drop_seed)

    def forward(self, ids):
        mask = torch.triu(torch.ones(CONTEXT, CONTEXT, dtype=torch.bool), 1)
        x = self.embed(ids) + self.place
        for block in self.blocks:
            if self.training and self.coin.random() < self.layerdrop:
                continue
            x = block(x, mask)
        return self.head(x)


@torch.no_grad()
def grow(net, extra):
    """New rows start at the mean of the old ones."""
    old, head = net.embed, net.head
    net.embed = nn.Embedding(old.num_embeddings + extra, old.embedding_dim)
    net.head = nn.Linear(head.in_features, head.out_features + extra)
    net.embed.weight.copy_(torch.cat([old.weight, old.weight.mean(0).expand(extra, -1)]))
    net.head.weight.copy_(torch.cat([head.weight, head.weight.mean(0).expand(extra, -1)]))
    net.head.bias.copy_(torch.cat([head.bias, head.bias.mean().expand(extra)]))


def wrap(net):
    return DDP(net, find_unused_parameters=True)


def train(model, stream, steps, lr, label):
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for step, ids in zip(range(1, steps + 1), stream):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if dist.get_rank() == 0:
                print(f"{label} {step:3d}: {shown.item() / dist.get_world_size():.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--letter-steps", type=int, default=40)
    ap.add_argument("--digit-steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(9)

    net = Writer(LETTERS, drop_seed=50 + rank)
    model = wrap(net)
    train(model, Sentences(LETTERS, args.batch, stream=100 + rank), args.letter_steps, 2e-3, "letters")

    grow(net, DIGITS)
    train(model, Sentences(LETTERS + DIGITS, args.batch, stream=200 + rank), args.digit_steps, 1e-3, "all")
    if rank == 0:
        torch.save(net.state_dict(), "writer.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
