"""Megatron-style tensor parallel MLP and attention by hand: all ranks read the same batches, each holds a slice of the weights."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

D, HEADS, SEQ, VOCAB = 32, 4, 12, 20


class CopyToRegion(torch.autograd.Function):
    """identity forward, sum of the gradients backward"""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def sliced(full, dim):
    world, rank = dist.get_world_size(), dist.get_rank()
    return nn.Parameter(full.chunk(world, dim)[rank].clone())


class ColumnLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight = sliced(torch.randn(o, i) / math.sqrt(i), 0)
        self.bias = sliced(torch.zeros(o), 0)

    def forward(self, x):
        return F.linear(CopyToRegion.apply(x), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight = sliced(torch.randn(o, i) / math.sqrt(i), 1)
        self.bias = nn.Parameter(torch.zeros(o))  # replicated, added once after the sum

    def forward(self, x):
        return ReduceFromRegion.apply(F.linear(x, self.weight)) + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v = ColumnLinear(D, D), ColumnLinear(D, D), ColumnLinear(D, D)
        self.o = RowLinear(D, D)
        self.up, self.down = ColumnLinear(D, 4 * D), RowLinear(4 * D, D)

    def forward(self, x):
        b, t, _ = x.shape
        h = self.ln1(x)
        local = HEADS // dist.get_world_size()
        q, k, v = (m(h).view(b, t, local, D // HEADS).transpose(1, 2) for m in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        x = x + self.o(a)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, D), nn.Parameter(torch.zeros(SEQ, D))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.ln, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, idx):
        x = self.tok(idx) + self.pos[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def global_norm(model, sharded):
    own = sum(p.grad.square().sum() for n, p in model.named_parameters() if n in sharded)
    dist.all_reduce(own)
    rest = sum(p.grad.square().sum() for n, p in model.named_parameters() if n not in sharded)
    return (own + rest).sqrt()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(42)  # the full matrices are drawn alike everywhere and then cut
    model = LM()
    sharded = {n for n, p in model.named_parameters() if any(f".{m}." in n for m in ("q", "k", "v", "up")) or n.endswith(("o.weight", "down.weight"))}
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(6)
    for step in range(40):
        start = torch.randint(0, VOCAB, (16, 1), generator=g)
        stride = torch.randint(1, 4, (16, 1), generator=g)
        seq = (start + stride * torch.arange(SEQ + 1)) % VOCAB
        loss = F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        norm = global_norm(model, sharded)
        scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            p.grad.mul_(scale)
        opt.step()
        if step % 10 == 9 and rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f} grad norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
