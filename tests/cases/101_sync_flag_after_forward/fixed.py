"""Character-level GPT in one file: micro steps, cosine schedule, each rank walks its own stripe of the stream."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

B, T = 8, 16
vocab_size, n_embd, n_head, n_layer = 27, 32, 2, 2
grad_accum_steps = 4
max_steps, warmup_steps = 30, 5
max_lr, min_lr = 8e-3, 8e-4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(b, t, 3, n_head, c // n_head).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(T, n_embd)
        self.h = nn.Sequential(*[Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TokenStream:
    def __init__(self, rank, world):
        g = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, 4, (40_000,), generator=g).cumsum(0) % vocab_size
        self.stride = B * T * world
        self.pos = B * T * rank

    def next_batch(self):
        buf = self.tokens[self.pos : self.pos + B * T + 1]
        self.pos += self.stride
        return buf[:-1].view(B, T), buf[1:].view(B, T)


def get_lr(it):
    if it < warmup_steps:
        return max_lr * (it + 1) / warmup_steps
    ratio = (it - warmup_steps) / (max_steps - warmup_steps)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (max_lr - min_lr)


dist.init_process_group("gloo")
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(1337)
model = DDP(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=max_lr, betas=(0.9, 0.95), weight_decay=0.1)
train_stream = TokenStream(ddp_rank, ddp_world_size)

for step in range(max_steps):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    optimizer.zero_grad()
    loss_accum = torch.zeros(())
    for micro_step in range(grad_accum_steps):
        x, y = train_stream.next_batch()
        model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        loss = model(x, y) / grad_accum_steps
        loss_accum += loss.detach()
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    dist.all_reduce(loss_accum)
    if ddp_rank == 0 and step % 5 == 0:
        print(f"step {step:3d} | loss {loss_accum.item() / ddp_world_size:.4f} | norm {norm:.3f} | lr {get_lr(step):.1e}")

dist.destroy_process_group()
