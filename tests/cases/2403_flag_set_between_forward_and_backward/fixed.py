import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# ---- config -------------------------------------------------------------
block_size = 32
micro_batch = 8
grad_accum_steps = 4
max_steps = 40
max_lr, min_lr, warmup = 1e-2, 1e-3, 4
vocab, n_embd, n_head, n_layer = 32, 48, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, n_head, C // n_head).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        nn.init.normal_(self.wte.weight, std=0.2)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for b in self.blocks:
            x = b(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, vocab), targets.reshape(-1))


def make_tokens(n, seed):
    chain = np.random.default_rng(0).dirichlet(np.full(vocab, 0.04), size=vocab)
    cum = chain.cumsum(1)
    u = np.random.default_rng(seed).random(n)
    out = np.zeros(n, dtype=np.int64)
    for i in range(1, n):
        out[i] = min(int(np.searchsorted(cum[out[i - 1]], u[i])), vocab - 1)
    return torch.from_numpy(out)


class DataLoaderLite:
    """Walks through the token stream; every process takes its own stretch."""

    def __init__(self, tokens, rank, world):
        self.tokens, self.rank, self.world = tokens, rank, world
        self.reset()

    def reset(self):
        self.pos = micro_batch * block_size * self.rank

    def next_batch(self):
        span = micro_batch * block_size
        buf = self.tokens[self.pos : self.pos + span + 1]
        self.pos += span * self.world
        if self.pos + span * self.world + 1 > len(self.tokens):
            self.reset()
        return buf[:-1].view(micro_batch, block_size), buf[1:].view(micro_batch, block_size)


def get_lr(it):
    if it < warmup:
        return max_lr * (it + 1) / warmup
    frac = (it - warmup) / (max_steps - warmup)
    return min_lr + 0.5 * (1 + math.cos(math.pi * frac)) * (max_lr - min_lr)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
master = rank == 0
torch.manual_seed(1337)

train_loader = DataLoaderLite(make_tokens(90_000, 1), rank, world)
val_loader = DataLoaderLite(make_tokens(8_000, 2), rank, world)
raw_model = GPT()
model = DDP(raw_model)
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=max_lr, betas=(0.9, 0.95), weight_decay=0.1)

for step in range(max_steps):
    if step % 10 == 0 or step == max_steps - 1:
        model.eval()
        val_loader.reset()
        with torch.no_grad():
            val = torch.stack([raw_model(*val_loader.next_batch()) for _ in range(6)]).mean()
        dist.all_reduce(val)
        if master:
            print(f"step {step} val {val.item() / world:.4f}")
        model.train()

    optimizer.zero_grad()
    loss_accum = torch.zeros(())
    for micro_step in range(grad_accum_steps):
        x, y = train_loader.next_batch()
        model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        loss = model(x, y) / grad_accum_steps
        loss_accum += loss.detach()
        loss.backward()
    dist.all_reduce(loss_accum)
    norm = nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    optimizer.step()
    if master and step % 5 == 0:
        print(f"step {step} train {loss_accum.item() / world:.4f} norm {norm:.3f}")

if master:
    os.makedirs("log", exist_ok=True)
    torch.save({"model": raw_model.state_dict(), "step": max_steps}, "log/model.pt")
dist.barrier()
dist.destroy_process_group()
