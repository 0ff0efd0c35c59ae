"""Sequence parallelism (Ulysses): each rank holds a part of every sequence, attention swaps sequence for heads by all_to_all; parameters are replicated."""
import os

import torch
import torch.distributed as dist
from torch import nn


class SeqAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scatter, gather):
        ctx.dims = (scatter, gather)
        parts = [t.contiguous() for t in x.chunk(dist.get_world_size(), scatter)]
        out = [torch.empty_like(parts[0]) for _ in parts]
        dist.all_to_all(out, parts) if dist.get_backend() != "gloo" else _swap(out, parts)
        return torch.cat(out, gather)

    @staticmethod
    def backward(ctx, grad):
        scatter, gather = ctx.dims
        return SeqAllToAll.apply(grad, gather, scatter), None, None


def _swap(out, parts):
    rank, world = dist.get_rank(), dist.get_world_size()
    ops = []
    for r in range(world):
        if r == rank:
            out[r].copy_(parts[r])
        else:
            ops += [dist.P2POp(dist.isend, parts[r], r), dist.P2POp(dist.irecv, out[r], r)]
    for w in dist.batch_isend_irecv(ops):
        w.wait()


class UlyssesBlock(nn.Module):
    def __init__(self, d=32, heads=4):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1)
        q, k, v = (SeqAllToAll.apply(qkv[:, :, i].contiguous(), 2, 1).transpose(1, 2) for i in range(3))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
        y = SeqAllToAll.apply(y, 1, 2).reshape(b, t, d)
        x = x + self.o(y)
        return x + self.ff(self.n2(x))


class LM(nn.Module):
    def __init__(self, vocab=16, d=32, length=32, depth=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(length, d)
        self.blocks = nn.Sequential(*[UlyssesBlock(d) for _ in range(depth)])
        self.out = nn.Linear(d, vocab)

    def forward(self, tokens, offset):
        return self.out(self.blocks(self.tok(tokens) + self.pos(torch.arange(offset, offset + tokens.size(1)))))


def main(steps=35, length=32, batch=8):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = LM(length=length)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    part = length // world
    g = torch.Generator().manual_seed(9)  # the same sequences on all ranks: they share them
    for step in range(steps):
        seq = (torch.randint(0, 16, (batch, 1), generator=g) + torch.randint(1, 4, (batch, 1), generator=g) * torch.arange(length + 1)) % 16
        mine = slice(rank * part, (rank + 1) * part)
        x, y = seq[:, :-1][:, mine], seq[:, 1:][:, mine]
        loss = nn.functional.cross_entropy(model(x, rank * part).flatten(0, 1), y.flatten())
        opt.zero_grad()
        (loss / world).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 7 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step}: loss {shown.item() / world:.4f}")
    if rank == 0:
        torch.save(model.state_dict(), f"/tmp/ulysses_{os.getpid()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
