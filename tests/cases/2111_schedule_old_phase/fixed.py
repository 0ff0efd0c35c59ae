"""Small causal transformer on a copy task, sharded with fully_shard; the second phase trains without weight decay."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

VOCAB, HALF, DIM, HEADS, LAYERS = 24, 8, 48, 4, 2
BATCH, LR, WARMUP, PHASE1, TOTAL = 16, 4e-3, 10, 50, 100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, DIM))
        return x + self.mlp(self.n2(x))


class CopyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(2 * HALF, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def stream(rank, seed=0):
    """Endless batches: a random word of HALF symbols, written twice."""
    g = torch.Generator().manual_seed(seed + 7919 * (rank + 1))
    while True:
        word = torch.randint(0, VOCAB, (BATCH, HALF), generator=g)
        text = torch.cat([word, word], 1)
        yield text[:, :-1], text[:, 1:]


def lr_factor(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP)))


def build_optimizer(model, weight_decay):
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=weight_decay)


def copy_loss(logits, target):
    return F.cross_entropy(logits[:, HALF - 1 :].flatten(0, 1), target[:, HALF - 1 :].flatten())


def train(rank, world):
    torch.manual_seed(3)
    model = CopyLM()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = build_optimizer(model, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    for step, (ids, target) in zip(range(TOTAL), stream(rank)):
        if step == PHASE1:
            optimizer = build_optimizer(model, weight_decay=0.0)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: lr_factor(s + PHASE1))
        loss = copy_loss(model(ids), target)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        scheduler.step()
        if step % 20 == 19:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(
                    f"step {step + 1:4d} loss {mean.item() / world:.4f} norm {norm.item():.3f} lr {scheduler.get_last_lr()[0]:.2e}",
                    flush=True,
                )
    return model


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = train(rank, world)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, "copylm.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
