"""A small causal transformer on a Markov source, sharded with FSDP2 (fully_shard) on a CPU mesh.

Both ranks build the same full model from one seed, then every block and the root are sharded.
Gradients arrive averaged by reduce-scatter; clipping is done on DTensors; the final full state is
gathered to rank 0 only.
"""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

V, T, D, HEADS = 24, 24, 64, 4


def transition():
    g = torch.Generator().manual_seed(7)
    return torch.softmax(2.0 * torch.randn(V, V, generator=g), dim=-1)


def sample_chain(n, seed):
    g = torch.Generator().manual_seed(seed)
    p = transition()
    x = torch.empty(n, T + 1, dtype=torch.long)
    x[:, 0] = torch.randint(V, (n,), generator=g)
    for t in range(T):
        x[:, t + 1] = torch.multinomial(p[x[:, t]], 1, generator=g).squeeze(1)
    return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
        self.drop = nn.Dropout(0.05)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(a.transpose(1, 2).reshape(b, t, D)))
        return x + self.drop(self.mlp(self.n2(x)))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(V, D)
        self.pos = nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        for blk in self.blocks:
            x = checkpoint(blk, x, use_reentrant=False) if self.training else blk(x)
        return self.head(self.norm(x))


def evaluate(model, data, rank, world):
    model.eval()
    sums = torch.zeros(2)
    # 128 rows, 2 ranks, chunks of 16: every rank makes the same number of calls.
    mine = data[rank::world]
    with torch.no_grad():
        for rows in mine.split(16):
            logits = model(rows[:, :-1])
            sums[0] += F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
            sums[1] += rows[:, 1:].numel()
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(0)
    model = LM()
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1000 + rank)  # dropout masks differ from here on

    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, betas=(0.9, 0.98))
    total, warm = 90, 10
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: (s + 1) / warm if s < warm
        else 0.5 * (1 + math.cos(math.pi * (s - warm) / (total - warm))))

    train, valid = sample_chain(960, seed=1), sample_chain(128, seed=2)
    first = evaluate(model, valid, rank, world)
    step, epoch, bs = 0, 0, 16
    while step < total:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        mine = order[rank::world]
        for idx in mine.split(bs):
            rows = train[idx]
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            opt.step()
            sched.step()
            step += 1
            if step % 30 == 0 and rank == 0:
                print(f"step {step} loss {loss.item():.3f} norm {norm.item():.3f}", flush=True)
            if step == total:
                break
        epoch += 1
    last = evaluate(model, valid, rank, world)
    full = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        os.makedirs("ckpt_fsdp2", exist_ok=True)
        torch.save(full, "ckpt_fsdp2/model.pt")
        print(f"valid nll {first:.3f} -> {last:.3f}")
    assert last < first - 0.3
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
