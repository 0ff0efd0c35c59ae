# small GPT pre-training, one file; torchrun or plain python
import math
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# -----------------------------------------------------------------------------
block_size, batch_size = 32, 12
gradient_accumulation_steps = 8  # micro-steps over all processes
n_layer, n_head, n_embd, vocab = 2, 4, 64, 64
max_iters, warmup_iters, eval_interval, eval_iters = 45, 6, 15, 4
learning_rate, min_lr, weight_decay, grad_clip = 6e-3, 3e-4, 0.1, 1.0
out_dir = "out"
# -----------------------------------------------------------------------------
torch.set_num_threads(1)
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert gradient_accumulation_steps % world_size == 0
    gradient_accumulation_steps //= world_size
else:
    rank, world_size = 0, 1
master = rank == 0
if master:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + rank)
data_rng = np.random.default_rng(1337 + rank)
ctx = torch.autocast("cpu", dtype=torch.bfloat16)


def make_corpus(n, seed):
    table = np.random.default_rng(3).integers(0, vocab, size=(vocab, 4))
    rng = np.random.default_rng(seed)
    pick, noise = rng.integers(0, 4, size=n), rng.random(n)
    rnd = rng.integers(0, vocab, size=n)
    out = np.zeros(n, dtype=np.uint16)
    for i in range(1, n):
        out[i] = rnd[i] if noise[i] < 0.05 else table[out[i - 1], pick[i]]
    return out


corpus = {"train": make_corpus(40000, 1), "val": make_corpus(8000, 2)}


def get_batch(split):
    data = corpus[split]
    ix = data_rng.integers(0, len(data) - block_size - 1, size=batch_size)
    x = np.stack([data[i:i + block_size] for i in ix]).astype(np.int64)
    y = np.stack([data[i + 1:i + 1 + block_size] for i in ix]).astype(np.int64)
    return torch.from_numpy(x), torch.from_numpy(y)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd, bias=False), nn.Linear(n_embd, n_embd, bias=False)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.05)
        nn.init.normal_(self.wpe.weight, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for b in self.blocks:
            x = b(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, vocab).float(), targets.reshape(-1))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(net):
    net.eval()
    out = torch.zeros(2)
    for i, split in enumerate(("train", "val")):
        for _ in range(eval_iters):
            with ctx:
                out[i] += net(*get_batch(split))[1].item() / eval_iters
    net.train()
    if ddp:
        dist.all_reduce(out)
        out /= world_size
    return out.tolist()


model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}],
                              lr=learning_rate, betas=(0.9, 0.95))
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model

X, Y = get_batch("train")
best_val, t0 = 1e9, time.time()
for iter_num in range(max_iters + 1):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        train_loss, val_loss = estimate_loss(raw_model)
        if master:
            print(f"step {iter_num}: train loss {train_loss:.4f}, val loss {val_loss:.4f}", flush=True)
            if val_loss < best_val and iter_num > 0:
                best_val = val_loss
                torch.save({"model": raw_model.state_dict(), "iter": iter_num}, os.path.join(out_dir, "ckpt.pt"))
    if iter_num == max_iters:
        break
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")  # prefetch the next batch
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % 15 == 0 and master:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, norm {norm:.3f}, {(time.time() - t0):.1f}s", flush=True)

if ddp:
    dist.barrier()
    dist.destroy_process_group()
