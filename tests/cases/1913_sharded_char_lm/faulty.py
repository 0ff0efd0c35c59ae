"""Next-character transformer, parameters sharded over the processes."""
import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class CharLM(nn.Module):
    def __init__(self, vocab, dim=64, depth=2, context=24):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)
        mask = torch.full((context, context), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        h = self.tok(x) + self.pos.weight
        for block in self.blocks:
            h = block(h, self.mask)
        return self.head(h)


def corpus(length=8000):
    """A periodic grammar with random choices."""
    g = torch.Generator().manual_seed(14)
    syllables = ["ba", "ke", "lo", "mi", "nu", "sa", "ti", "ro"]
    state, out = 0, []
    while len(out) < length:
        state = (state + 1 + int(torch.randint(0, 2, (), generator=g))) % 8
        out += list(syllables[state]) + [" "]
    chars = sorted(set(out))
    return torch.tensor([chars.index(c) for c in out]), len(chars)


def build(args, vocab, mesh):
    torch.manual_seed(args.seed)
    model = CharLM(vocab, context=args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimizer


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=80)
    ap.add_argument("--batch", type=int, default=12)
    ap.add_argument("--context", type=int, default=24)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=23)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    text, vocab = corpus()
    model, optimizer = build(args, vocab, mesh)

    draw = torch.Generator().manual_seed(900 + rank)
    began = time.perf_counter()
    running = torch.zeros(1)
    for step in range(1, args.steps + 1):
        start = torch.randint(0, len(text) - args.context - 1, (args.batch,), generator=draw)
        window = torch.stack([text[s : s + args.context + 1] for s in start.tolist()])
        logits = model(window[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running += loss.detach()
        if step % 20 == 0:
            dist.all_reduce(running)
            if rank == 0:
                rate = 20 * args.batch * world / (time.perf_counter() - began)
                print(f"step {step} loss {running.item() / (20 * world):.4f} ({rate:.0f} windows/s)", flush=True)
            running.zero_()
            began = time.perf_counter()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
