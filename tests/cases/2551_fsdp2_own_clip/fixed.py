"""Character language model, sharded with fully_shard, bf16 free, gradient accumulation and clipping."""
import argparse
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass
class Config:
    vocab: int = 29
    dim: int = 48
    heads: int = 4
    depth: int = 2
    block: int = 24
    micro_batch: int = 12
    accum: int = 2
    steps: int = 60
    lr: float = 0.08
    max_norm: float = 0.6
    seed: int = 17


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.n1, self.n2 = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim)
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim)
        self.proj = nn.Linear(cfg.dim, cfg.dim)
        self.mlp = nn.Sequential(nn.Linear(cfg.dim, 4 * cfg.dim), nn.GELU(), nn.Linear(4 * cfg.dim, cfg.dim))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.n2(x))


class CharLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.dim)
        self.pos = nn.Parameter(0.02 * torch.randn(cfg.block, cfg.dim))
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.depth))
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos[: ids.size(1)]
        for blk in self.blocks:
            x = blk(x)
        return self.head(self.norm(x))


def make_text(cfg, n=40_000):
    g = torch.Generator().manual_seed(5)
    table = torch.softmax(3.0 * torch.randn(cfg.vocab, cfg.vocab, generator=g), dim=1)
    out = torch.empty(n, dtype=torch.long)
    out[0] = 0
    draws = torch.rand(n, generator=g)
    cdf = table.cumsum(1)
    for i in range(1, n):
        out[i] = int(torch.searchsorted(cdf[out[i - 1]], draws[i]).clamp(max=cfg.vocab - 1))
    return out


def sample(text, cfg, gen):
    at = torch.randint(0, text.numel() - cfg.block - 1, (cfg.micro_batch,), generator=gen)
    ids = torch.stack([text[i : i + cfg.block + 1] for i in at.tolist()])
    return ids[:, :-1], ids[:, 1:]


def clip_gradients(params, max_norm):
    grads = [p.grad for p in params if p.grad is not None]
    total = torch.zeros(())
    for g in grads:
        total += g.to_local().float().square().sum()
    dist.all_reduce(total)
    norm = math.sqrt(total.item())
    scale = min(1.0, max_norm / (norm + 1e-6))
    for g in grads:
        g.mul_(scale)
    return norm


def build(cfg, mesh):
    torch.manual_seed(cfg.seed)
    model = CharLM(cfg)
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, cfg.steps, eta_min=cfg.lr * 0.1)
    return model, opt, sched


def train(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    text = make_text(cfg)
    model, opt, sched = build(cfg, mesh)
    gen = torch.Generator().manual_seed(1000 + rank)

    for step in range(cfg.steps):
        opt.zero_grad(set_to_none=True)
        mean = torch.zeros(())
        for micro in range(cfg.accum):
            model.set_requires_gradient_sync(micro == cfg.accum - 1)
            x, y = sample(text, cfg, gen)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / cfg.accum
            loss.backward()
            mean += loss.detach()
        norm = clip_gradients(list(model.parameters()), cfg.max_norm)
        opt.step()
        sched.step()
        if step % 10 == 0 or step == cfg.steps - 1:
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3d} loss {mean.item() / world:.4f} |g| {norm:.3f} lr {sched.get_last_lr()[0]:.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=Config.steps)
    ap.add_argument("--max-norm", type=float, default=Config.max_norm)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    train(Config(steps=args.steps, max_norm=args.max_norm))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
