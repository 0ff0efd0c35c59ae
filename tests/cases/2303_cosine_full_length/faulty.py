"""Small character language model on a generated toy grammar."""
import math
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CFG = SimpleNamespace(
    context=32, dim=48, heads=4, layers=2, batch_size=16, epochs=4,
    peak_lr=3e-3, min_lr=1e-5, warmup_frac=0.1, clip=1.0, seed=3,
)


def corpus(n_sentences=2200):
    import random

    rng = random.Random(11)
    nouns = ["cat", "dog", "fox", "owl", "hen"]
    verbs = ["sees", "eats", "hears", "likes"]
    adj = ["red", "old", "shy", "big"]
    out = []
    for _ in range(n_sentences):
        a, b = rng.choice(nouns), rng.choice(nouns)
        out.append(f"the {rng.choice(adj)} {a} {rng.choice(verbs)} the {b}.")
    return " ".join(out)


class Windows(Dataset):
    def __init__(self, text, context):
        self.vocab = sorted(set(text))
        lookup = {c: i for i, c in enumerate(self.vocab)}
        self.ids = torch.tensor([lookup[c] for c in text])
        self.context = context

    def __len__(self):
        return (len(self.ids) - 1) // self.context

    def __getitem__(self, i):
        s = i * self.context
        chunk = self.ids[s:s + self.context + 1]
        return chunk[:-1], chunk[1:]


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (m.view(b, t, self.heads, -1).transpose(1, 2) for m in self.qkv(self.ln1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class CharLM(nn.Module):
    def __init__(self, vocab, c):
        super().__init__()
        self.tok = nn.Embedding(vocab, c.dim)
        self.pos = nn.Embedding(c.context, c.dim)
        self.blocks = nn.Sequential(*[Block(c.dim, c.heads) for _ in range(c.layers)])
        self.norm = nn.LayerNorm(c.dim)
        self.head = nn.Linear(c.dim, vocab, bias=False)

    def forward(self, idx):
        h = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        return self.head(self.norm(self.blocks(h)))


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        torch.manual_seed(cfg.seed)
        self.data = Windows(corpus(), cfg.context)
        self.sampler = DistributedSampler(self.data, self.world, self.rank, seed=cfg.seed, drop_last=True)
        self.loader = DataLoader(self.data, cfg.batch_size, sampler=self.sampler, drop_last=True)
        self.model = DDP(CharLM(len(self.data.vocab), cfg))
        self.optimizer = self._optimizer()
        self.scheduler = self._scheduler()

    def _optimizer(self):
        decay = [p for p in self.model.parameters() if p.dim() >= 2]
        plain = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.cfg.peak_lr, betas=(0.9, 0.95))

    def _scheduler(self):
        steps_per_epoch = len(self.data) // self.cfg.batch_size
        total = self.cfg.epochs * steps_per_epoch
        warmup = max(1, int(total * self.cfg.warmup_frac))
        floor = self.cfg.min_lr / self.cfg.peak_lr

        def shape(step):
            if step < warmup:
                return (step + 1) / warmup
            progress = min(1.0, (step - warmup) / max(1, total - warmup))
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, shape)

    def step(self, x, y):
        logits = self.model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            total = torch.zeros(())
            for x, y in self.loader:
                total += self.step(x, y)
            dist.all_reduce(total)
            mean = total.item() / (self.world * len(self.loader))
            if self.rank == 0:
                lr = self.scheduler.get_last_lr()[0]
                print(f"epoch {epoch} | loss {mean:.4f} | lr {lr:.2e}", flush=True)
        if self.rank == 0:
            torch.save(self.model.module.state_dict(), "charlm.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Trainer(CFG).fit()
    dist.destroy_process_group()
