"""Byte-level LM pre-training with FSDP2 and gradient accumulation."""
import argparse
import logging
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

log = logging.getLogger("pretrain")


@dataclass
class Config:
    vocab: int = 32
    dim: int = 48
    layers: int = 2
    heads: int = 4
    seq: int = 24
    n_seqs: int = 416
    batch: int = 8
    accum: int = 4
    epochs: int = 6
    lr: float = 3e-3
    seed: int = 17


class Grammar(Dataset):
    """Sequences of a noisy deterministic successor rule."""

    def __init__(self, cfg, n, seed):
        g = torch.Generator().manual_seed(seed)
        nxt = torch.randperm(cfg.vocab, generator=torch.Generator().manual_seed(1))
        x = torch.empty(n, cfg.seq + 1, dtype=torch.long)
        x[:, 0] = torch.randint(cfg.vocab, (n,), generator=g)
        for t in range(cfg.seq):
            noise = torch.rand(n, generator=g) < 0.1
            rnd = torch.randint(cfg.vocab, (n,), generator=g)
            x[:, t + 1] = torch.where(noise, rnd, nxt[x[:, t]])
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i, :-1], self.x[i, 1:]


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.h = cfg.heads
        self.n1, self.n2 = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim)
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim)
        self.out = nn.Linear(cfg.dim, cfg.dim)
        self.mlp = nn.Sequential(nn.Linear(cfg.dim, 4 * cfg.dim), nn.GELU(), nn.Linear(4 * cfg.dim, cfg.dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.dim)
        self.pos = nn.Parameter(torch.zeros(cfg.seq, cfg.dim))
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.head = nn.Linear(cfg.dim, cfg.vocab)

    def forward(self, x):
        h = self.tok(x) + self.pos
        for blk in self.blocks:
            h = blk(h)
        return self.head(h)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    tot = torch.zeros(2, dtype=torch.float64)
    for x, y in loader:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        tot += torch.tensor([loss.item(), y.numel()], dtype=torch.float64)
    dist.all_reduce(tot)
    model.train()
    return (tot[0] / tot[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=Config.epochs)
    p.add_argument("--accum", type=int, default=Config.accum)
    cfg = Config(**vars(p.parse_args()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)
    torch.manual_seed(cfg.seed)

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    model = LM(cfg)
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)

    train = Grammar(cfg, cfg.n_seqs, 3)
    sampler = DistributedSampler(train, shuffle=True, seed=cfg.seed, drop_last=True)
    loader = DataLoader(train, batch_size=cfg.batch, sampler=sampler, drop_last=True)
    val = Grammar(cfg, 128, 4)
    val_loader = DataLoader(val, batch_size=32, sampler=DistributedSampler(val, shuffle=False))

    n_batches = len(loader)
    steps = 0
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        window = []
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % cfg.accum == 0
            first_of_window = (i // cfg.accum) * cfg.accum
            window_len = min(cfg.accum, n_batches - first_of_window)
            model.set_requires_gradient_sync(last)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            (loss / window_len).backward()
            window.append(loss.item())
            if (i + 1) % cfg.accum == 0 or i + 1 == n_batches:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad(set_to_none=True)
                steps += 1
        mean = torch.tensor(sum(window) / len(window))
        dist.all_reduce(mean)
        v = validate(model, val_loader)
        log.info("epoch %d steps %d train %.4f val %.4f ppl %.2f", epoch, steps, mean.item() / world, v, math.exp(v))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
