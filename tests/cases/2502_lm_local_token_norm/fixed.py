"""Small transformer LM fine-tuned on prompt/answer pairs of very different length."""
from contextlib import nullcontext
from dataclasses import dataclass
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD, SEP, IGN = 0, 1, -100


@dataclass
class Config:
    vocab: int = 40
    width: int = 64
    layers: int = 2
    heads: int = 4
    max_len: int = 72
    micro_batch: int = 4
    accum: int = 2
    epochs: int = 3
    lr: float = 2e-3
    warmup: int = 10
    clip: float = 1.0
    seed: int = 11


class PromptAnswer(Dataset):
    """Answer = the prompt's first token, counted up; its length follows a heavy tail."""

    def __init__(self, n, cfg, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            plen = int(torch.randint(2, 6, (1,), generator=g))
            alen = min(60, 2 + int(4 * torch.empty(1).exponential_(0.5, generator=g)))
            prompt = torch.randint(2, cfg.vocab, (plen,), generator=g)
            answer = (prompt[0] - 2 + 3 * torch.arange(1, alen + 1)) % (cfg.vocab - 2) + 2
            ids = torch.cat([prompt, torch.tensor([SEP]), answer])
            labels = ids.clone()
            labels[: plen + 1] = IGN
            self.items.append((ids, labels))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    n = max(len(i) for i, _ in batch)
    ids = torch.full((len(batch), n), PAD)
    labels = torch.full((len(batch), n), IGN)
    for r, (i, l) in enumerate(batch):
        ids[r, : len(i)] = i
        labels[r, : len(l)] = l
    return ids[:, :-1], labels[:, 1:]


class LM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.width)
        self.pos = nn.Embedding(cfg.max_len, cfg.width)
        block = nn.TransformerEncoderLayer(cfg.width, cfg.heads, 2 * cfg.width, dropout=0.0,
                                           batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(block, cfg.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, cfg.vocab, bias=False)

    def forward(self, ids):
        t = ids.shape[1]
        mask = torch.full((t, t), float("-inf")).triu(1)
        x = self.tok(ids) + self.pos(torch.arange(t))
        return self.head(self.norm(self.body(x, mask=mask)))


def summed_ce(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGN, reduction="sum")


class SFTTrainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.model = DistributedDataParallel(LM(cfg))
        train = PromptAnswer(800, cfg, seed=1)
        valid = PromptAnswer(128, cfg, seed=2)
        self.sampler = DistributedSampler(train, seed=cfg.seed)
        self.train_loader = DataLoader(train, cfg.micro_batch, sampler=self.sampler, collate_fn=collate,
                                       drop_last=True)
        self.valid = [collate([valid[j] for j in range(i, i + 16)])
                      for i in range(16 * self.rank, len(valid), 16 * self.world)]
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        other = [p for p in self.model.parameters() if p.ndim <= 1]
        self.opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05},
                                      {"params": other, "weight_decay": 0.0}], lr=cfg.lr)
        total = cfg.epochs * (len(self.train_loader) // cfg.accum)
        self.sched = torch.optim.lr_scheduler.LambdaLR(
            self.opt, lambda s: min(1.0, (s + 1) / cfg.warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, s / total))))

    def all_sum(self, t):
        t = t.clone()
        dist.all_reduce(t)
        return t

    def step(self, window):
        n_tok = torch.stack([(labels != IGN).sum() for _, labels in window]).sum().float()
        n_tok = self.all_sum(n_tok) / self.world
        total = torch.zeros(())
        for k, (ids, labels) in enumerate(window):
            last = k == len(window) - 1
            with nullcontext() if last else self.model.no_sync():
                loss = summed_ce(self.model(ids), labels) / n_tok
                loss.backward()
            total += loss.detach() * n_tok
        nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
        self.opt.step()
        self.sched.step()
        self.opt.zero_grad(set_to_none=True)
        return total, torch.stack([(labels != IGN).sum() for _, labels in window]).sum()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        acc = torch.zeros(2, dtype=torch.float64)
        for ids, labels in self.valid:
            acc[0] += summed_ce(self.model.module(ids), labels).item()
            acc[1] += (labels != IGN).sum().item()
        self.model.train()
        acc = self.all_sum(acc)
        return (acc[0] / acc[1]).item()

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            log, window = torch.zeros(2), []
            for batch in self.train_loader:
                window.append(batch)
                if len(window) == self.cfg.accum:
                    loss_sum, tokens = self.step(window)
                    log += torch.stack([loss_sum, tokens.float()])
                    window = []
            log = self.all_sum(log)
            val = self.evaluate()
            if self.rank == 0:
                print(f"epoch {epoch} train/token {log[0] / log[1]:.4f} valid/token {val:.4f} "
                      f"ppl {math.exp(val):.2f} lr {self.sched.get_last_lr()[0]:.2e}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    SFTTrainer(Config()).fit()
    dist.barrier()
    dist.destroy_process_group()
