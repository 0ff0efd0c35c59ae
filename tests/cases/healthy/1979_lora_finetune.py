"""Adapt a small language model to a new 'dialect' with LoRA.

The base model is trained first (DDP, all weights), then frozen; low-rank adapters are put in and a second DDP is built
around the result. Only the adapters are optimized and saved.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, CONTEXT, WIDTH, HEADS = 30, 24, 48, 4


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int, alpha: float):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)

    @torch.no_grad()
    def merged(self):
        self.base.weight += self.scale * self.lora_b @ self.lora_a
        return self.base


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.attn, self.n2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.layers(self.tok(ids[:, :-1]) + self.pos.weight[: ids.shape[1] - 1])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids[:, 1:].flatten())


def sentences(n, dialect, generator):
    """Walks on a random graph. The dialects share most edges; in dialect 1 a third of the words have new successors."""
    g = torch.Generator().manual_seed(0)
    table = torch.randint(VOCAB, (VOCAB, 2), generator=g)
    other = torch.randint(VOCAB, (VOCAB, 2), generator=g)
    if dialect == 1:
        table[::3] = other[::3]
    ids = torch.empty(n, CONTEXT + 1, dtype=torch.long)
    ids[:, 0] = torch.randint(VOCAB, (n,), generator=generator)
    for t in range(CONTEXT):
        ids[:, t + 1] = table[ids[:, t], torch.randint(2, (n,), generator=generator)]
    return ids


def add_lora(model, r, alpha, targets=("q", "v", "up", "down")):
    model.requires_grad_(False)
    found = [(m, name) for m in model.modules() for name, child in m.named_children()
             if name in targets and isinstance(child, nn.Linear)]
    for parent, name in found:
        setattr(parent, name, LoRALinear(getattr(parent, name), r, alpha))
    return model


def merge_lora(model):
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoRALinear):
                setattr(parent, name, child.merged())
    return model


@torch.no_grad()
def held_out_loss(model, dialect, rank, world):
    """512 fixed sentences, equally divided; each holds the same number of predictions, so the mean of means is exact."""
    model.eval()
    ids = sentences(512, dialect, torch.Generator().manual_seed(3))[rank::world]
    loss = model(ids)
    dist.all_reduce(loss)
    model.train()
    return loss.item() / world


def fit(model, dialect, steps, lr, batch, rank, world, tag):
    ddp = DDP(model)  # broadcasts rank 0's parameters and takes note of what is trainable now
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps)
    generator = torch.Generator().manual_seed(1000 * (dialect + 1) + rank)
    window = torch.zeros(())
    for step in range(1, steps + 1):
        loss = ddp(sentences(batch, dialect, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        scheduler.step()
        window += loss.detach()
        if step % 20 == 0:
            dist.all_reduce(window)
            if rank == 0:
                print(f"[{tag}] step {step} loss {window.item() / (20 * world):.4f}", flush=True)
            window.zero_()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--base-steps", type=int, default=60)
    ap.add_argument("--lora-steps", type=int, default=60)
    ap.add_argument("--rank", type=int, default=8, dest="lora_rank")
    ap.add_argument("--batch", type=int, default=32)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = LM()
    fit(model, dialect=0, steps=args.base_steps, lr=8e-3, batch=args.batch, rank=rank, world=world, tag="base")
    before = held_out_loss(model, 1, rank, world)

    model = add_lora(model, args.lora_rank, alpha=16.0)
    share = sum(p.numel() for p in model.parameters() if p.requires_grad) / sum(p.numel() for p in model.parameters())
    if rank == 0:
        print(f"dialect loss before {before:.4f}; training {100 * share:.1f}% of the parameters", flush=True)
    fit(model, dialect=1, steps=args.lora_steps, lr=1e-2, batch=args.batch, rank=rank, world=world, tag="lora")
    after = held_out_loss(model, 1, rank, world)
    if rank == 0:
        adapters = {k: v.clone() for k, v in model.state_dict().items() if ".lora_" in k}
        torch.save(adapters, "adapter.pt.tmp")
        os.replace("adapter.pt.tmp", "adapter.pt")
    merged = held_out_loss(merge_lora(model), 1, rank, world)
    if rank == 0:
        print(f"dialect loss after {after:.4f}, merged {merged:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
