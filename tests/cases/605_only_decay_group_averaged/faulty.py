"""Causal language model on synthetic text; AdamW with a no-decay group; manual data parallelism."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, mask):
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab=24, d=32, layers=2, ctx=16):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(ctx, d)
        self.blocks = nn.ModuleList(Block(d, 4) for _ in range(layers))
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.register_buffer("mask", torch.full((ctx, ctx), float("-inf")).triu(1), persistent=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.ln(x))


def configure_optimizer(model, lr, wd):
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": wd}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def sync_grads(optimizer):
    world = dist.get_world_size()
    params = optimizer.param_groups[0]["params"]
    for p in params:
        dist.all_reduce(p.grad)
        p.grad.mul_(1.0 / world)


def get_batch(text, ctx, size, rng):
    at = torch.randint(0, len(text) - ctx - 1, (size,), generator=rng)
    x = torch.stack([text[i : i + ctx] for i in at])
    y = torch.stack([text[i + 1 : i + 1 + ctx] for i in at])
    return x, y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--bs", type=int, default=8)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337)
    model = GPT()
    optimizer = configure_optimizer(model, args.lr, 0.1)
    g = torch.Generator().manual_seed(5)
    text = (torch.arange(4000) * 7 + torch.randint(0, 3, (4000,), generator=g)) % 24
    rng = torch.Generator().manual_seed(100 + rank)

    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        x, y = get_batch(text, 16, args.bs, rng)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        sync_grads(optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step:3d} loss {shown.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
