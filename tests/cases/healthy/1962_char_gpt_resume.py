"""Character-level GPT in the manner of nanoGPT: one file, module-level configuration, gradient accumulation, resume.

The run is done in two legs, 'scratch' and 'resume', to show that the second picks up where the first stopped.
    torchrun --nproc-per-node 2 1962_char_gpt_resume.py
"""
import math
import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# -----------------------------------------------------------------------------
out_dir = "out-char"
eval_interval = 15
eval_iters = 4
gradient_accumulation_steps = 4  # over all processes
batch_size = 8
learning_rate = 1e-2
min_lr = 1e-3
warmup_iters = 5
lr_decay_iters = 80
max_iters = 80
grad_clip = 1.0
base_seed = 1337
# -----------------------------------------------------------------------------


@dataclass
class GPTConfig:
    block_size: int = 48
    vocab_size: int = 32
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 48
    dropout: float = 0.1


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_head, self.p = c.n_head, c.dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.c_attn, self.c_proj = nn.Linear(c.n_embd, 3 * c.n_embd), nn.Linear(c.n_embd, c.n_embd)
        self.mlp = nn.Sequential(nn.Linear(c.n_embd, 4 * c.n_embd), nn.GELU(),
                                 nn.Linear(4 * c.n_embd, c.n_embd), nn.Dropout(c.dropout))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                   for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.1)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def prepare(path):
    """A Markov 'language' over 32 symbols with three possible successors each."""
    rng = np.random.default_rng(0)
    successors = rng.integers(0, 32, size=(32, 3))
    seq = [1]
    for pick in rng.integers(0, 3, size=24000):
        seq.append(int(successors[seq[-1], pick]))
    arr = np.array(seq, dtype=np.uint16)
    arr[:21000].tofile(os.path.join(path, "train.bin"))
    arr[21000:].tofile(os.path.join(path, "val.bin"))


def get_batch(split, key, block_size):
    # The batch is a function of `key` alone, so a resumed run needs no stored generator state.
    data = np.memmap(os.path.join(out_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    rng = np.random.default_rng(key)
    ix = rng.integers(0, len(data) - block_size - 1, size=batch_size)
    x = torch.stack([torch.from_numpy(data[i:i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1:i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(raw_model, rank, world):
    raw_model.eval()
    out = {}
    for split in ("train", "val"):
        losses = torch.stack([raw_model(*get_batch(split, (base_seed, 7, rank, k), raw_model.config.block_size))
                              for k in range(eval_iters)])
        mean = losses.mean()
        dist.all_reduce(mean)
        out[split] = mean.item() / world
    raw_model.train()
    return out


def train(init_from, stop_iter):
    rank, world = dist.get_rank(), dist.get_world_size()
    master = rank == 0
    assert gradient_accumulation_steps % world == 0
    accum = gradient_accumulation_steps // world
    torch.manual_seed(base_seed + rank)  # DDP sends rank 0's initial weights to everybody
    ckpt_path = os.path.join(out_dir, "ckpt.pt")

    iter_num, best_val_loss = 0, 1e9
    if init_from == "scratch":
        model = GPT(GPTConfig())
    else:
        ckpt = torch.load(ckpt_path, map_location="cpu", weights_only=True)
        model = GPT(GPTConfig(**ckpt["model_args"]))
        model.load_state_dict(ckpt["model"])
        iter_num, best_val_loss = ckpt["iter_num"], ckpt["best_val_loss"]
    raw_model, model = model, DDP(model)
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    if init_from == "resume":
        optimizer.load_state_dict(ckpt["optimizer"])
    torch.manual_seed(base_seed + 100 * (iter_num + 1) + rank)  # dropout: own stream per process and per leg

    while True:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        if iter_num % eval_interval == 0 or iter_num == stop_iter:
            losses = estimate_loss(raw_model, rank, world)
            if master:
                print(f"[{init_from}] iter {iter_num}: train {losses['train']:.4f} val {losses['val']:.4f}", flush=True)
            best_val_loss = min(best_val_loss, losses["val"])
        if iter_num == stop_iter:
            break
        for micro in range(accum):
            with model.no_sync() if micro < accum - 1 else nullcontext():
                x, y = get_batch("train", (base_seed, 1, iter_num, micro, rank), raw_model.config.block_size)
                loss = model(x, y) / accum
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1

    if master:
        state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num,
                 "model_args": asdict(raw_model.config), "best_val_loss": best_val_loss}
        torch.save(state, ckpt_path + ".tmp")
        os.replace(ckpt_path + ".tmp", ckpt_path)
    dist.barrier()  # nobody reads the checkpoint before it is complete


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        os.makedirs(out_dir, exist_ok=True)
        prepare(out_dir)
    dist.barrier()
    train("scratch", stop_iter=40)
    train("resume", stop_iter=max_iters)
    dist.destroy_process_group()
