"""Character-level pretraining, then a reward head on the same body."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, BLOCK, VOCAB = 16, 12, 26


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.att = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.register_buffer("mask", torch.triu(torch.ones(BLOCK, BLOCK, dtype=torch.bool), 1), persistent=False)

    def forward(self, x):
        h = self.ln1(x)
        x = x + self.att(h, h, h, attn_mask=self.mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class Body(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Parameter(0.02 * torch.randn(BLOCK, dim))
        self.blocks = nn.Sequential(Block(dim, 2), Block(dim, 2))
        self.lm_head = nn.Linear(dim, VOCAB)

    def forward(self, idx):
        return self.lm_head(self.blocks(self.tok(idx) + self.pos))


class Reward(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.score = nn.Linear(VOCAB, 1)

    def forward(self, idx):
        return self.score(self.body(idx).mean(1)).squeeze(1)


def text(step, rank, offset):
    g = torch.Generator().manual_seed(offset + 10 * step + rank)
    start = torch.randint(0, VOCAB, (BATCH, 1), generator=g)
    stride = torch.randint(1, 4, (BATCH, 1), generator=g)
    return (start + stride * torch.arange(BLOCK + 1)) % VOCAB, stride.squeeze(1).float()


def pretrain(path, rank, steps):
    torch.manual_seed(0)
    net = Body()
    model = DDP(torch.compile(net, backend="eager"))
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for step in range(steps):
        seq, _ = text(step, rank, 0)
        loss = F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
    if rank == 0:
        print(f"lm loss {loss.item():.3f}", flush=True)
        torch.save({"model": model.module.state_dict(), "step": steps}, path)
    dist.barrier()


def reward_stage(path, rank, steps):
    torch.manual_seed(1)
    body = Body()
    state = torch.load(path)["model"]
    body.load_state_dict(state, strict=False)
    model = DDP(Reward(body))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        seq, stride = text(step, rank, 7000)
        loss = F.mse_loss(model(seq[:, :-1]), stride)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
    if rank == 0:
        print(f"reward loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    pretrain("lm.pt", rank, 40)
    reward_stage("lm.pt", rank, 40)
    dist.destroy_process_group()
