"""Packed language modelling: bfloat16 autocast, torch.compile, token-weighted loss over the whole group, profiler on a few steps."""
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import Dataset, DistributedSampler, DataLoader

IGNORE = -100


@dataclass
class Cfg:
    vocab: int = 40
    dim: int = 48
    block: int = 48
    docs: int = 900
    batch: int = 4
    micro: int = 2
    epochs: int = 6
    lr: float = 8e-3


class Packed(Dataset):
    """Documents are laid end to end; labels that cross a document border and prompts are ignored."""

    def __init__(self, cfg, n, seed):
        g = torch.Generator().manual_seed(seed)
        rule = torch.randperm(cfg.vocab - 1, generator=torch.Generator().manual_seed(2)) + 1
        ids, labels, doc, pos = [], [], [], []
        for d in range(n):
            length = int(torch.randint(6, 30, (1,), generator=g))
            prompt = int(torch.randint(1, 4, (1,), generator=g))
            seq = [int(torch.randint(1, cfg.vocab, (1,), generator=g))]
            while len(seq) < length + 1:
                jump = torch.rand(1, generator=g).item() < 0.08
                seq.append(int(torch.randint(1, cfg.vocab, (1,), generator=g)) if jump else int(rule[seq[-1] - 1]))
            ids += seq[:-1]
            labels += [IGNORE] * prompt + seq[prompt + 1:]
            doc += [d] * length
            pos += list(range(length))
        n_blocks = len(ids) // cfg.block
        shape = lambda v: torch.tensor(v[: n_blocks * cfg.block]).view(n_blocks, cfg.block)
        self.rows = tuple(shape(v) for v in (ids, labels, doc, pos))

    def __len__(self):
        return len(self.rows[0])

    def __getitem__(self, i):
        return tuple(r[i] for r in self.rows)


class LM(nn.Module):
    def __init__(self, cfg, heads=4):
        super().__init__()
        self.heads = heads
        self.tok, self.pos = nn.Embedding(cfg.vocab, cfg.dim), nn.Embedding(32, cfg.dim)
        self.n1, self.n2 = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim)
        self.qkv, self.proj = nn.Linear(cfg.dim, 3 * cfg.dim), nn.Linear(cfg.dim, cfg.dim)
        self.ff = nn.Sequential(nn.Linear(cfg.dim, 4 * cfg.dim), nn.GELU(), nn.Linear(4 * cfg.dim, cfg.dim))
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        self.head.weight = self.tok.weight
        nn.init.normal_(self.tok.weight, std=0.15)

    def forward(self, ids, doc, pos):
        b, t = ids.shape
        x = self.tok(ids) + self.pos(pos)
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        causal = torch.ones(t, t, dtype=torch.bool).tril()
        mask = (doc[:, :, None] == doc[:, None, :]) & causal
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, -1))
        return self.head(x + self.ff(self.n2(x)))


def token_loss(model, batch):
    ids, labels, doc, pos = batch
    with torch.amp.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids, doc, pos)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def main():
    cfg = Cfg()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DDP(torch.compile(LM(cfg), backend="eager"))
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=cfg.lr)
    data, val = Packed(cfg, cfg.docs, 1), Packed(cfg, 120, 2)
    sampler = DistributedSampler(data, seed=3, drop_last=True)
    loader = DataLoader(data, batch_size=cfg.batch, sampler=sampler, drop_last=True)
    windows = len(loader) // cfg.micro
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / 8) * (0.5 + 0.5 * math.cos(math.pi * min(1, s / (windows * cfg.epochs)))))
    prof = profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=2, warmup=1, active=2, repeat=1))
    prof.start()
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        it = iter(loader)
        seen = torch.zeros(2)
        for _ in range(windows):
            micro = [next(it) for _ in range(cfg.micro)]
            tokens = torch.tensor(float(sum((m[1] != IGNORE).sum() for m in micro)))
            dist.all_reduce(tokens)
            opt.zero_grad()
            for j, m in enumerate(micro):
                model.require_backward_grad_sync = j == cfg.micro - 1
                loss = token_loss(model, m)
                # DDP averages over the group, so the group size is given back here
                (loss * world / tokens).backward()
                seen += torch.tensor([loss.item(), float((m[1] != IGNORE).sum())])
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            prof.step()
        dist.all_reduce(seen)
        with torch.no_grad():
            rows = [val[i] for i in range(rank, len(val), world)]
            batch = tuple(torch.stack(c) for c in zip(*rows))
            v = torch.tensor([token_loss(model.module, batch).item(), float((batch[1] != IGNORE).sum())])
        dist.all_reduce(v)
        if rank == 0:
            print(f"epoch {epoch} train {(seen[0] / seen[1]).item():.4f} val {(v[0] / v[1]).item():.4f}", flush=True)
    prof.stop()
    if rank == 0:
        print(prof.key_averages().table(sort_by="cpu_time_total", row_limit=3).splitlines()[3][:60])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
