"""
Character GPT in one flat file.
$ torchrun --standalone --nproc-per-node 2 train.py
"""
import math
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import barrier, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

# ---------------------------------------------------------------- config
out_dir = "out"
eval_interval = 30
eval_iters = 8
gradient_accumulation_steps = 4      # over all ranks
batch_size = 8                       # micro batch of one rank
block_size = 32
n_layer, n_head, n_embd, dropout = 2, 2, 48, 0.1
vocab_size = 29
learning_rate, min_lr, warmup_iters, max_iters = 1e-2, 1e-3, 10, 120
grad_clip = 1.0
dtype = torch.bfloat16
# ---------------------------------------------------------------- ddp
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    assert gradient_accumulation_steps % world == 0
    gradient_accumulation_steps //= world
else:
    rank, world = 0, 1
master = rank == 0
seed_offset = rank
torch.manual_seed(1337 + seed_offset)

# ---------------------------------------------------------------- data
if master:
    os.makedirs(out_dir, exist_ok=True)
    g = np.random.default_rng(0)
    succ = g.integers(0, vocab_size, size=(vocab_size, 3))
    stream = np.zeros(60_000, dtype=np.uint16)
    for i in range(1, len(stream)):
        stream[i] = succ[stream[i - 1], g.integers(3)] if g.random() < 0.95 else g.integers(vocab_size)
    stream[:54_000].tofile(os.path.join(out_dir, "train.bin"))
    stream[54_000:].tofile(os.path.join(out_dir, "val.bin"))
if ddp:
    barrier()


def get_batch(split):
    data = np.memmap(os.path.join(out_dir, split + ".bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i:i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1:i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


# ---------------------------------------------------------------- model
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, n_head, c // n_head).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*[Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe.weight[: idx.size(1)]
        logits = self.head(self.ln_f(self.blocks(x)))
        return F.cross_entropy(logits.float().view(-1, vocab_size), targets.view(-1))


model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
nodecay = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}],
                              lr=learning_rate, betas=(0.9, 0.95))
raw_model = model
if ddp:
    model = DDP(model)
amp = torch.autocast("cpu", dtype=dtype)


@torch.no_grad()
def estimate_loss():
    raw_model.eval()
    out = {}
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            with amp:
                losses[k] = raw_model(*get_batch(split))
        out[split] = losses.mean().item()
    raw_model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


# ---------------------------------------------------------------- loop
X, Y = get_batch("train")
best_val, t0, iter_num = 1e9, time.time(), 0
while True:
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iter_num % eval_interval == 0 and master:
        losses = estimate_loss()
        print(f"step {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}, {time.time() - t0:.1f}s")
        if losses["val"] < best_val:
            best_val = losses["val"]
            if iter_num > 0:
                torch.save({"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(),
                            "iter_num": iter_num, "best_val": best_val}, os.path.join(out_dir, "ckpt.pt"))
    if iter_num == max_iters:
        break
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with amp:
            loss = model(X, Y) / gradient_accumulation_steps
        X, Y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
if ddp:
    barrier()
    destroy_process_group()
