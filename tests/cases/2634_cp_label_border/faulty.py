"""Small causal LM trained with context parallelism: every rank holds one slice of each sequence."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, SEQ, WIDTH, HEADS = 24, 24, 32, 4
STEPS, BATCH, LR = 180, 32, 3e-3


class GatherSeq(torch.autograd.Function):
    """All-gather along the time axis; the gradient of every slice is summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g.chunk(dist.get_world_size(), dim=2)[dist.get_rank()].contiguous()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, offset, sharded):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, HEADS, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        if sharded:
            k, v = GatherSeq.apply(k), GatherSeq.apply(v)
        score = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        qpos = torch.arange(offset, offset + t)
        score = score.masked_fill(torch.arange(k.shape[2])[None, :] > qpos[:, None], float("-inf"))
        y = (score.softmax(-1) @ v).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + self.proj(y)
        return x + self.ff(self.n2(x))


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, offset=0, sharded=False):
        x = self.tok(ids) + self.pos(torch.arange(offset, offset + ids.shape[1]))
        for blk in self.blocks:
            x = blk(x, offset, sharded)
        return self.head(self.norm(x))


def sample(gen, n):
    """Arithmetic walks: token t+1 = token t + stride (mod VOCAB), one stride per sequence."""
    start = torch.randint(VOCAB, (n, 1), generator=gen)
    stride = torch.randint(1, 6, (n, 1), generator=gen)
    return (start + stride * torch.arange(SEQ)) % VOCAB


def shard(tokens):
    rank, world = dist.get_rank(), dist.get_world_size()
    span = SEQ // world
    lo = rank * span
    ids = tokens[:, lo:lo + span]
    labels = torch.roll(ids, -1, dims=1)
    if rank == world - 1:
        labels[:, -1] = -100
    return ids, labels, lo


@torch.no_grad()
def evaluate(model):
    model.eval()
    tokens = sample(torch.Generator().manual_seed(4242), 256)
    hit = (model(tokens)[:, 1:-1].argmax(-1) == tokens[:, 2:]).float()
    model.train()
    return hit.mean().item(), hit.mean(0).min().item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = TinyLM()
    opt = torch.optim.AdamW(model.parameters(), lr=LR)
    gen = torch.Generator().manual_seed(17)
    for step in range(STEPS):
        ids, labels, offset = shard(sample(gen, BATCH))
        logits = model(ids, offset, sharded=True)
        count = (labels != -100).sum()
        dist.all_reduce(count)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 50 == 0 or step == STEPS - 1:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step} loss {total.item():.4f}", flush=True)
    if rank == 0:
        acc, worst = evaluate(model)
        print(f"next-token accuracy {acc:.3f} worst position {worst:.3f}", flush=True)
        os.makedirs("ckpt", exist_ok=True)
        torch.save(model.state_dict(), "ckpt/lm.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
