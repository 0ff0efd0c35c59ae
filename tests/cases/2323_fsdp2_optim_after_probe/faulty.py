"""Decoder-only character model sharded with fully_shard over a CPU mesh."""
import gc
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    vocab: int = 40
    ctx: int = 24
    dim: int = 48
    heads: int = 4
    layers: int = 2
    batch: int = 32
    epochs: int = 4
    lr: float = 3e-3
    seed: int = 21


class Sequences(Dataset):
    """Tokens following a fixed sparse transition table."""

    def __init__(self, cfg, n, seed):
        table = torch.Generator().manual_seed(1234)
        nxt = torch.stack([torch.randperm(cfg.vocab, generator=table)[:3] for _ in range(cfg.vocab)])
        g = torch.Generator().manual_seed(seed)
        tok = torch.randint(0, cfg.vocab, (n,), generator=g)
        rows = [tok]
        for _ in range(cfg.ctx):
            pick = torch.multinomial(torch.tensor([0.8, 0.15, 0.05]), n, replacement=True, generator=g)
            tok = nxt[tok, pick]
            rows.append(tok)
        self.data = torch.stack(rows, dim=1)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        row = self.data[i]
        return row[:-1], row[1:]


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.ln1, self.ln2 = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim)
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim)
        self.proj = nn.Linear(cfg.dim, cfg.dim)
        self.mlp = nn.Sequential(nn.Linear(cfg.dim, 4 * cfg.dim), nn.GELU(), nn.Linear(4 * cfg.dim, cfg.dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class CharLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.dim)
        self.pos = nn.Embedding(cfg.ctx, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.vocab)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def validate(model, loader):
    model.eval()
    acc = torch.zeros(2)
    for x, y in loader:
        acc += torch.tensor([loss_of(model, x, y).item() * len(x), float(len(x))])
    dist.all_reduce(acc)
    model.train()
    return (acc[0] / acc[1]).item()


def build_loader(dataset, cfg, rank, world, shuffle):
    sampler = DistributedSampler(dataset, world, rank, shuffle=shuffle, seed=cfg.seed)
    return DataLoader(dataset, batch_size=cfg.batch, sampler=sampler, drop_last=shuffle), sampler


def train(cfg, rank, world):
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(cfg.seed)
    model = CharLM(cfg)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    train_loader, sampler = build_loader(Sequences(cfg, 2048, seed=1), cfg, rank, world, True)
    valid_loader, _ = build_loader(Sequences(cfg, 256, seed=2), cfg, rank, world, False)

    start = validate(model, valid_loader)
    if rank == 0:
        print(f"untrained validation loss {start:.4f}", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.epochs * len(train_loader))

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for x, y in train_loader:
            loss = loss_of(model, x, y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            running += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(running)
        valid = validate(model, valid_loader)
        if rank == 0:
            print(f"epoch {epoch} train {running[0] / running[1]:.4f} valid {valid:.4f}", flush=True)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Config(), dist.get_rank(), dist.get_world_size())
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
