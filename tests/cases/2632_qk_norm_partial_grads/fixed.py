"""Associative recall with one tensor-parallel attention block, laid out as dp x tp."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    tp: int = 2
    vocab: int = 16
    pairs: int = 5
    width: int = 32
    heads: int = 4
    steps: int = 120
    batch: int = 32
    lr: float = 4e-3
    seed: int = 11


class Mesh:
    def __init__(self, tp):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.tp, self.dp = tp, world // tp
        self.tp_rank, self.dp_rank = rank % tp, rank // tp
        for d in range(self.dp):
            ranks = list(range(d * tp, (d + 1) * tp))
            grp = dist.new_group(ranks)
            if rank in ranks:
                self.tp_group = grp
        for t in range(tp):
            ranks = list(range(t, world, tp))
            grp = dist.new_group(ranks)
            if rank in ranks:
                self.dp_group = grp


class EnterTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class LeaveTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class ParallelAttention(nn.Module):
    def __init__(self, cfg, mesh):
        super().__init__()
        self.mesh = mesh
        self.local_heads = cfg.heads // mesh.tp
        self.hd = cfg.width // cfg.heads
        part = self.local_heads * self.hd
        lo = mesh.tp_rank * part
        for name in ("wq", "wk", "wv"):
            full = torch.randn(cfg.width, cfg.width) / cfg.width ** 0.5
            setattr(self, name, nn.Parameter(full[lo:lo + part].clone()))
        full = torch.randn(cfg.width, cfg.width) / cfg.width ** 0.5
        self.wo = nn.Parameter(full[:, lo:lo + part].clone())
        self.bias = nn.Parameter(torch.zeros(cfg.width))
        self.q_norm = nn.RMSNorm(self.hd)
        self.k_norm = nn.RMSNorm(self.hd)

    def forward(self, x):
        b, t, _ = x.shape
        x = EnterTP.apply(x, self.mesh.tp_group)
        q, k, v = (F.linear(x, w).view(b, t, self.local_heads, self.hd) for w in (self.wq, self.wk, self.wv))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        return LeaveTP.apply(F.linear(y, self.wo), self.mesh.tp_group) + self.bias


class Recall(nn.Module):
    def __init__(self, cfg, mesh):
        super().__init__()
        self.tok = nn.Embedding(2 * cfg.vocab, cfg.width)
        self.prev = nn.Linear(cfg.width, cfg.width, bias=False)
        self.n1, self.n2 = nn.RMSNorm(cfg.width), nn.RMSNorm(cfg.width)
        self.attn = ParallelAttention(cfg, mesh)
        self.out = nn.Linear(cfg.width, cfg.vocab)

    def forward(self, ids):
        h = self.tok(ids)
        h = h + self.prev(F.pad(h, (0, 0, 1, 0))[:, :-1])
        h = h + self.attn(self.n1(h))
        return self.out(self.n2(h[:, -1]))


def draw(cfg, gen, n):
    keys = torch.rand(n, cfg.vocab, generator=gen).argsort(1)[:, :cfg.pairs]
    vals = torch.randint(cfg.vocab, (n, cfg.pairs), generator=gen)
    ask = torch.randint(cfg.pairs, (n, 1), generator=gen)
    seq = torch.stack([keys, vals + cfg.vocab], 2).view(n, -1)
    return torch.cat([seq, keys.gather(1, ask)], 1), vals.gather(1, ask).squeeze(1)


def sync_gradients(model, mesh):
    partial = [model.attn.q_norm.weight.grad, model.attn.k_norm.weight.grad]
    for g in partial:
        dist.all_reduce(g, group=mesh.tp_group)
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.dp_group)
        p.grad.div_(mesh.dp)


@torch.no_grad()
def accuracy(model, cfg, mesh):
    ids, tgt = draw(cfg, torch.Generator().manual_seed(5000 + mesh.dp_rank), 512)
    stat = torch.tensor([(model(ids).argmax(1) == tgt).float().sum(), float(len(tgt))])
    dist.all_reduce(stat, group=mesh.dp_group)
    return (stat[0] / stat[1]).item()


def main():
    torch.set_num_threads(1)
    cfg = Config()
    dist.init_process_group("gloo")
    mesh = Mesh(cfg.tp)
    torch.manual_seed(cfg.seed)
    model = Recall(cfg, mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)
    gen = torch.Generator().manual_seed(cfg.seed * 1000 + mesh.dp_rank)
    for step in range(cfg.steps):
        ids, tgt = draw(cfg, gen, cfg.batch)
        opt.zero_grad()
        loss = F.cross_entropy(model(ids), tgt)
        loss.backward()
        sync_gradients(model, mesh)
        opt.step()
        if step % 40 == 0 or step == cfg.steps - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=mesh.dp_group)
            if dist.get_rank() == 0:
                print(f"step {step} loss {mean.item() / mesh.dp:.4f}", flush=True)
    acc = accuracy(model, cfg, mesh)
    if dist.get_rank() == 0:
        print(f"held-out recall {acc:.3f}", flush=True)
    if mesh.dp_rank == 0:
        os.makedirs("export", exist_ok=True)
        torch.save(model.state_dict(), f"export/part_tp{mesh.tp_rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
