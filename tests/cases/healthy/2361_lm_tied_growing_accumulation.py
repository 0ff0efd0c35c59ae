"""Small causal LM: tied embeddings, activation checkpointing, falling dropout, accumulation that grows with time."""
import argparse
import contextlib
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

VOCAB, CONTEXT = 24, 24


class MarkovText:
    """Second-order chain over a small alphabet, sentences of random length, padded on the right."""

    PAD = 0

    def __init__(self, seed):
        table = torch.Generator().manual_seed(2)
        self.next = 1 + torch.randint(VOCAB - 1, (VOCAB, VOCAB, 2), generator=table)
        self.gen = torch.Generator().manual_seed(seed)

    def batch(self, n):
        seq = 1 + torch.randint(VOCAB - 1, (n, CONTEXT + 1), generator=self.gen)
        coin = (torch.rand(n, CONTEXT + 1, generator=self.gen) < 0.2).long()
        for i in range(2, CONTEXT + 1):
            seq[:, i] = self.next[seq[:, i - 1], seq[:, i - 2] % 3, coin[:, i]]
        length = torch.randint(8, CONTEXT + 2, (n, 1), generator=self.gen)
        seq = seq.masked_fill(torch.arange(CONTEXT + 1)[None] >= length, self.PAD)
        return seq[:, :-1], seq[:, 1:]


class Block(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))
        self.drop, self.heads = nn.Dropout(0.2), heads

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d)
        x = x + self.drop(self.proj(a))
        return x + self.drop(self.ff(self.n2(x)))


class LM(nn.Module):
    def __init__(self, dim=48, layers=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        nn.init.normal_(self.tok.weight, std=0.05)
        self.pos = nn.Parameter(0.02 * torch.randn(CONTEXT, dim))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, t):
        x = self.tok(t) + self.pos[:t.shape[1]]
        for b in self.blocks:
            x = checkpoint(b, x, use_reentrant=False) if self.training else b(x)
        return self.head(self.norm(x))


def micro_steps(step, total):
    return 1 if step < total // 3 else 2 if step < 2 * total // 3 else 4


def set_dropout(model, p):
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = p


def optimizer_step(model, opt, text, k, batch, world):
    """Loss is normalised by the tokens of the whole global batch, not per micro-batch."""
    micro = [text.batch(batch) for _ in range(k)]
    tokens = torch.tensor([float(sum((y != MarkovText.PAD).sum() for _, y in micro))])
    dist.all_reduce(tokens)
    total = torch.zeros(1)
    opt.zero_grad()
    for i, (x, y) in enumerate(micro):
        with contextlib.nullcontext() if i == k - 1 else model.no_sync():
            logits = model(x)
            summed = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=MarkovText.PAD, reduction="sum")
            (summed * world / tokens).backward()      # DDP divides by the world size
        total += summed.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    dist.all_reduce(total)
    return (total / tokens).item()


@torch.no_grad()
def perplexity(net, rank):
    net.eval()
    x, y = MarkovText(seed=999_000 + rank).batch(300)
    nll = F.cross_entropy(net(x).flatten(0, 1), y.flatten(), ignore_index=MarkovText.PAD, reduction="sum")
    stat = torch.stack([nll, (y != MarkovText.PAD).sum().float()])
    dist.all_reduce(stat)
    net.train()
    return math.exp((stat[0] / stat[1]).item())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=210)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=4e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(12)
    model = DDP(LM())
    torch.manual_seed(120 + rank)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.steps, pct_start=0.15)
    text = MarkovText(seed=1200 + rank)
    for step in range(args.steps):
        k = micro_steps(step, args.steps)
        set_dropout(model, 0.2 * (1 - step / args.steps))
        loss = optimizer_step(model, opt, text, k, args.batch, world)
        sched.step()
        if rank == 0 and step % 35 == 0:
            print(f"step {step:4d} micro-batches {k} loss {loss:.3f}", flush=True)
    ppl = perplexity(model.module, rank)
    if rank == 0:
        print(f"held-out perplexity {ppl:.2f}")
        torch.save(model.module.state_dict(), "lm.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
