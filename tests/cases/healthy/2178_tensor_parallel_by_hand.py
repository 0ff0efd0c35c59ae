"""Megatron-style tensor parallelism written out: column/row-parallel layers, vocabulary-parallel embedding and cross-entropy."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM, HEADS, LAYERS, CONTEXT, BATCH, STEPS = 32, 32, 4, 2, 24, 16, 150


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def shard(full, dim):
    """cut this rank's part from a tensor that all ranks drew alike"""
    p = nn.Parameter(full.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())
    p.tensor_parallel = True
    return p


class ColumnLinear(nn.Module):
    def __init__(self, i, o, groups=1):
        super().__init__()
        full = torch.randn(groups, o // groups, i) * i ** -0.5      # q, k and v are cut one by one
        self.weight, self.bias = shard(full, 1), shard(torch.zeros(groups, o // groups), 1)

    def forward(self, x):
        return F.linear(CopyToRegion.apply(x), self.weight.flatten(0, 1), self.bias.flatten())


class RowLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight, self.bias = shard(torch.randn(o, i) * (i * 2 * LAYERS) ** -0.5, 1), nn.Parameter(torch.zeros(o))

    def forward(self, x):
        return ReduceFromRegion.apply(F.linear(x, self.weight)) + self.bias     # the bias once, after the sum


class VocabEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = shard(torch.randn(VOCAB, DIM) * 0.1, 0)
        self.low = dist.get_rank() * self.weight.size(0)

    def forward(self, ids):
        local = ids - self.low
        outside = (local < 0) | (local >= self.weight.size(0))
        rows = F.embedding(local.masked_fill(outside, 0), self.weight).masked_fill(outside[..., None], 0.0)
        return ReduceFromRegion.apply(rows)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = HEADS // dist.get_world_size()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = ColumnLinear(DIM, 3 * DIM, groups=3), RowLinear(DIM, DIM)
        self.up, self.down, self.drop = ColumnLinear(DIM, 4 * DIM), RowLinear(4 * DIM, DIM), nn.Dropout(0.05)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        x = x + self.drop(self.proj(a))
        return x + self.drop(self.down(F.gelu(self.up(self.ln2(x)))))


class ParallelGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos = VocabEmbedding(), nn.Parameter(torch.randn(CONTEXT, DIM) * 0.1)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(DIM)

    def forward(self, ids):
        x = self.embed(ids) + self.pos[: ids.size(1)]
        for b in self.blocks:
            x = b(x)
        return F.linear(CopyToRegion.apply(self.norm(x)), self.embed.weight)      # logits of the local vocabulary only


def vocab_cross_entropy(logits, target, low):
    peak = logits.detach().amax(-1)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    logits = logits - peak[..., None]
    denominator = ReduceFromRegion.apply(logits.exp().sum(-1))
    local = target - low
    outside = (local < 0) | (local >= logits.size(-1))
    picked = logits.gather(-1, local.masked_fill(outside, 0)[..., None]).squeeze(-1).masked_fill(outside, 0.0)
    return (denominator.log() - ReduceFromRegion.apply(picked)).mean()


def clip_grad_norm(params, limit):
    """cut tensors are summed over ranks, replicated ones counted once"""
    cut = sum(p.grad.pow(2).sum() for p in params if getattr(p, "tensor_parallel", False))
    whole = sum(p.grad.pow(2).sum() for p in params if not getattr(p, "tensor_parallel", False))
    dist.all_reduce(cut)
    norm = (cut + whole).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for p in params:
        p.grad.mul_(scale)
    return norm.item()


def stream(length, seed):
    g = torch.Generator().manual_seed(13)
    follow = torch.randint(VOCAB, (VOCAB, 2), generator=g)
    g.manual_seed(seed)
    coin, out = torch.randint(2, (length,), generator=g).tolist(), [0]
    for c in coin:
        out.append(int(follow[out[-1], c]))
    return torch.tensor(out)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2024)                       # one seed: the same cuts, the same dropout masks and the same batches
    model = ParallelGPT()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=4e-3, weight_decay=0.01)
    train, valid = stream(8000, 1), stream(1200, 2)

    def batch(data, n):
        at = torch.randint(len(data) - CONTEXT - 1, (n,))
        window = torch.stack([data[i:i + CONTEXT + 1] for i in at])
        return window[:, :-1], window[:, 1:]

    for step in range(1, STEPS + 1):
        x, y = batch(train, BATCH)
        loss = vocab_cross_entropy(model(x), y, model.embed.low)
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm(params, 1.0)
        optimizer.step()
        if step % 50 == 0:
            model.eval()
            with torch.no_grad():
                x, y = batch(valid, 64)
                held_out = vocab_cross_entropy(model(x), y, model.embed.low).item()
            model.train()
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} valid {held_out:.4f} norm {norm:.3f}", flush=True)
    os.makedirs("tp", exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"tp/mp_rank_{rank:02d}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
