import functools
import math
import os
import resource

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, WIDTH, MAXLEN, BATCH, STEPS = 24, 32, 80, 32, 320


@functools.lru_cache(maxsize=None)
def positions(length, width):
    pos = torch.arange(length).float()[:, None]
    freq = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(pos * freq)
    table[:, 1::2] = torch.cos(pos * freq)
    return table


def attention_bias(lengths, longest):
    keep = torch.arange(longest)[None, :] < lengths[:, None]
    square = keep[:, None, :] & keep[:, :, None]
    square = square | torch.eye(longest, dtype=torch.bool)[None]
    return torch.zeros(square.shape).masked_fill_(~square, float("-inf"))[:, None]


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x, bias):
        b, t, w = x.shape
        q, k, v = self.qkv(self.n1(x)).reshape(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.n2(x))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(Layer(WIDTH, 2) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens, lengths):
        longest = tokens.shape[1]
        x = self.embed(tokens) + positions(longest, WIDTH)
        bias = attention_bias(lengths, longest)
        for layer in self.layers:
            x = layer(x, bias)
        keep = (torch.arange(longest)[None, :] < lengths[:, None]).unsqueeze(-1)
        return self.head((x * keep).sum(1) / lengths[:, None])


def sentences(gen):
    """Endless labelled batches: does token 3 occur more often than token 4?"""
    while True:
        lengths = torch.randint(24, MAXLEN + 1, (BATCH,), generator=gen)
        tokens = torch.randint(1, VOCAB, (BATCH, int(lengths.max())), generator=gen)
        label = torch.randint(0, 2, (BATCH,), generator=gen)
        swap = torch.rand(tokens.shape, generator=gen) < 0.2
        tokens = torch.where(swap, (4 - label)[:, None].expand_as(tokens), tokens)
        pad = torch.arange(tokens.shape[1])[None] >= lengths[:, None]
        yield tokens.masked_fill(pad, 0), lengths, label


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Tagger())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    stream = sentences(torch.Generator().manual_seed(1000 + rank))

    stats = torch.zeros(3)
    for step in range(1, STEPS + 1):
        tokens, lengths, label = next(stream)
        logits = model(tokens, lengths)
        loss = F.cross_entropy(logits, label)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        stats += torch.tensor([loss.item(), (logits.argmax(1) == label).float().mean().item(), 1.0])
        if step % 40 == 0:
            dist.all_reduce(stats)
            if rank == 0:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                print(f"step {step} loss {stats[0] / stats[2]:.3f} acc {stats[1] / stats[2]:.3f} peak {peak} MB", flush=True)
            stats.zero_()

    if rank == 0:
        torch.save(model.module.state_dict(), "tagger.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
