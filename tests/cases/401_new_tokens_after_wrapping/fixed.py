"""Tiny causal LM with a character tokenizer that may learn special tokens from the corpus."""
import dataclasses
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


@dataclasses.dataclass
class Config:
    width: int = 32
    context: int = 24
    batch: int = 8
    steps: int = 40
    lr: float = 3e-3


class CharTokenizer:
    def __init__(self, alphabet="abcdefgh "):
        self.ids = {c: i for i, c in enumerate(alphabet)}

    def add_special_tokens(self, tokens):
        new = [t for t in tokens if t not in self.ids]
        for t in new:
            self.ids[t] = len(self.ids)
        return len(new)

    def __len__(self):
        return len(self.ids)

    def encode(self, text):
        out = []
        for word in text.split("|"):
            out += [self.ids[word]] if word in self.ids else [self.ids[c] for c in word]
        return out


class TinyLM(nn.Module):
    def __init__(self, vocab, cfg):
        super().__init__()
        self.embedding = nn.Embedding(vocab, cfg.width)
        self.rnn = nn.GRU(cfg.width, cfg.width, batch_first=True)
        self.bias = nn.Linear(cfg.width, cfg.width)

    def resize_token_embeddings(self, vocab):
        old = self.embedding.weight
        if vocab == old.shape[0]:
            return
        fresh = old.detach().mean(0, keepdim=True).repeat(vocab - old.shape[0], 1)
        self.embedding = nn.Embedding.from_pretrained(torch.cat([old.detach(), fresh]), freeze=False)

    def forward(self, ids):
        h, _ = self.rnn(self.embedding(ids))
        return self.bias(h) @ self.embedding.weight.T


def corpus(lines=200):
    rng = random.Random(7)
    words = ["abba", "head", "cab", "face", "deaf", "badge"]
    return ["<doc>|" + " ".join(rng.choice(words) for _ in range(12)) + "|<end>" for _ in range(lines)]


class Trainer:
    def __init__(self, cfg):
        self.cfg, self.rank, self.world = cfg, dist.get_rank(), dist.get_world_size()
        self.tokenizer = CharTokenizer()
        torch.manual_seed(1)
        self.net = TinyLM(len(self.tokenizer), cfg)
        self.model = None

    def prepare_data(self, texts):
        self.tokenizer.add_special_tokens(["<doc>", "<end>"])
        self.net.resize_token_embeddings(len(self.tokenizer))
        self.model = DistributedDataParallel(self.net)
        self.lines = [torch.tensor(self.tokenizer.encode(t)) for t in texts[self.rank :: self.world]]

    def batches(self):
        rng = random.Random(100 + self.rank)
        for _ in range(self.cfg.steps):
            rows = [rng.choice(self.lines)[: self.cfg.context + 1] for _ in range(self.cfg.batch)]
            yield torch.stack(rows)

    def fit(self):
        opt = torch.optim.AdamW(self.model.parameters(), lr=self.cfg.lr)
        for step, rows in enumerate(self.batches()):
            logits = self.model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if step % 10 == 9:
                mean = loss.detach() / self.world
                dist.all_reduce(mean)
                if self.rank == 0:
                    print(f"step {step + 1:3d} loss {mean.item():.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method="env://")
    trainer = Trainer(Config())
    trainer.prepare_data(corpus())
    trainer.fit()
    dist.destroy_process_group()
