"""Megatron-like tensor parallel transformer encoder. All ranks see the same batch, weights are cut in slices."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class SumFromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def sliced(full, dim):
    part = full.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()
    p = nn.Parameter(part)
    p.tp_sharded = True
    return p


class ColumnLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight = sliced(torch.randn(o, i) / math.sqrt(i), 0)
        self.bias = sliced(torch.zeros(o), 0)

    def forward(self, x):
        return F.linear(CopyToShards.apply(x), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight = sliced(torch.randn(o, i) / math.sqrt(i), 1)
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, x):
        return SumFromShards.apply(F.linear(x, self.weight)) + self.bias


class Block(nn.Module):
    def __init__(self, dim, heads, drop):
        super().__init__()
        self.local_heads = heads // dist.get_world_size()
        self.hd = dim // heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v = ColumnLinear(dim, dim), ColumnLinear(dim, dim), ColumnLinear(dim, dim)
        self.proj = RowLinear(dim, dim)
        self.up, self.down = ColumnLinear(dim, 2 * dim), RowLinear(2 * dim, dim)
        self.drop = nn.Dropout(drop)

    def heads(self, t):
        b, n, _ = t.shape
        return t.view(b, n, self.local_heads, self.hd).transpose(1, 2)

    def forward(self, x):
        h = self.n1(x)
        a = F.scaled_dot_product_attention(self.heads(self.q(h)), self.heads(self.k(h)), self.heads(self.v(h)))
        x = x + self.drop(self.proj(a.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))


class Encoder(nn.Module):
    def __init__(self, vocab, dim, heads, length, drop=0.05):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Parameter(0.7 * torch.randn(length, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, drop) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, t):
        x = self.tok(t) + self.pos
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def sample(gen, n, vocab, length):
    """Task: output the sequence in reversed order."""
    t = torch.randint(vocab, (n, length), generator=gen)
    return t, t.flip(1)


def clip(params, max_norm):
    local = sum(p.grad.pow(2).sum() for p in params if getattr(p, "tp_sharded", False))
    dist.all_reduce(local)
    norm = (local + sum(p.grad.pow(2).sum() for p in params if not getattr(p, "tp_sharded", False))).sqrt()
    scale = min(1.0, max_norm / (norm.item() + 1e-6))
    for p in params:
        p.grad.mul_(scale)
    return norm.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=350)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--seed", type=int, default=17)
    args = ap.parse_args()
    vocab, length = 12, 10
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)     # one seed everywhere: full matrices and residual dropout must agree

    model = Encoder(vocab, 48, 4, length)
    params = list(model.parameters())
    opt = torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 40) * (1 - s / (args.steps + 1)))
    gen = torch.Generator().manual_seed(args.seed + 1)
    model.train()
    for step in range(args.steps):
        x, y = sample(gen, args.batch, vocab, length)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        norm = clip(params, 1.0)
        opt.step()
        warm.step()
        if rank == 0 and step % 70 == 0:
            print(f"step {step:4d} loss {loss.item():.3f} norm {norm:.2f}", flush=True)

    model.eval()
    with torch.no_grad():
        x, y = sample(torch.Generator().manual_seed(4242), 500, vocab, length)
        acc = (model(x).argmax(-1) == y).float().mean().item()
    if rank == 0:
        print(f"token accuracy {acc:.3f}")
    torch.save(model.state_dict(), f"tp_shard_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
