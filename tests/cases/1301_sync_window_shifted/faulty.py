"""Next-token model on generated sequences; micro batches are collected before each update."""
import contextlib
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    vocab: int = 24
    length: int = 12
    width: int = 32
    micro_batch: int = 8
    accum: int = 4
    epochs: int = 4
    lr: float = 3e-3


def counting_songs(cfg, n=384):
    g = torch.Generator().manual_seed(90)
    start = torch.randint(0, cfg.vocab, (n, 1), generator=g)
    pace = torch.randint(1, 4, (n, 1), generator=g)
    seq = (start + pace * torch.arange(cfg.length + 1)) % cfg.vocab
    return TensorDataset(seq[:, :-1], seq[:, 1:])


class TinyLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.width)
        self.pos = nn.Parameter(0.02 * torch.randn(cfg.length, cfg.width))
        self.block = nn.TransformerEncoderLayer(cfg.width, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(cfg.width, cfg.vocab)
        mask = torch.full((cfg.length, cfg.length), float("-inf")).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, ids):
        return self.head(self.block(self.tok(ids) + self.pos, src_mask=self.mask))


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.model = DDP(TinyLM(cfg))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        data = counting_songs(cfg)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=cfg.micro_batch, sampler=self.sampler)

    def micro_step(self, i, ids, target):
        sync = i % self.cfg.accum == 0
        with contextlib.nullcontext() if sync else self.model.no_sync():
            logits = self.model(ids)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
            (loss / self.cfg.accum).backward()
        return loss.item()

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            total = 0.0
            for i, (ids, target) in enumerate(self.loader):
                total += self.micro_step(i, ids, target)
                if (i + 1) % self.cfg.accum == 0:
                    self.opt.step()
                    self.opt.zero_grad()
            mean = torch.tensor(total / len(self.loader))
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    Trainer(Config()).fit()
    dist.destroy_process_group()
