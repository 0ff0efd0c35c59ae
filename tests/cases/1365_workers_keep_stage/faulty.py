"""Sequence reversal with a transformer; the sequences get longer from stage to stage."""
import argparse
import math
import random
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD, BOS = 0, 1


@dataclass
class Stage:
    epochs: int
    max_len: int


@dataclass
class Config:
    stages: list = field(default_factory=lambda: [Stage(2, 4), Stage(2, 8), Stage(2, 12)])
    vocab: int = 16
    d_model: int = 32
    layers: int = 1
    batch_size: int = 32
    samples: int = 512
    lr: float = 4e-3
    workers: int = 2
    seed: int = 1

    @property
    def longest(self):
        return max(s.max_len for s in self.stages)


class ReverseTask(Dataset):
    """Sample i is a random sequence; its length is drawn up to the limit of the current stage."""

    def __init__(self, cfg, seed):
        self.cfg, self.seed = cfg, seed
        self.max_len = cfg.stages[0].max_len

    def __len__(self):
        return self.cfg.samples

    def __getitem__(self, i):
        rng = random.Random(self.seed * 1_000_003 + i)
        n = rng.randint(2, self.max_len)
        tokens = [rng.randrange(2, self.cfg.vocab) for _ in range(n)]
        return torch.tensor(tokens), torch.tensor(tokens[::-1])


def collate(batch):
    sources, targets = zip(*batch)
    src = nn.utils.rnn.pad_sequence(sources, batch_first=True, padding_value=PAD)
    tgt = nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=PAD)
    start = torch.full((len(batch), 1), BOS)
    return src, torch.cat([start, tgt[:, :-1]], 1), tgt


class Positions(nn.Module):
    def __init__(self, d, longest):
        super().__init__()
        pos = torch.arange(longest).unsqueeze(1)
        div = torch.exp(torch.arange(0, d, 2) * (-math.log(1000.0) / d))
        table = torch.zeros(longest, d)
        table[:, 0::2], table[:, 1::2] = torch.sin(pos * div), torch.cos(pos * div)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x):
        return x + self.table[:x.size(1)]


class Reverser(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.d_model, padding_idx=PAD)
        self.positions = Positions(cfg.d_model, cfg.longest)
        self.core = nn.Transformer(cfg.d_model, 4, cfg.layers, cfg.layers, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(cfg.d_model, cfg.vocab)

    def forward(self, src, dec):
        blank = src == PAD
        causal = torch.triu(torch.ones(dec.size(1), dec.size(1), dtype=torch.bool), 1)
        h = self.core(self.positions(self.embed(src)), self.positions(self.embed(dec)), tgt_mask=causal,
                      src_key_padding_mask=blank, memory_key_padding_mask=blank)
        return self.out(h)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.model = DDP(Reverser(cfg))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=cfg.lr, betas=(0.9, 0.98))
        self.dataset = ReverseTask(cfg, cfg.seed)
        self.sampler = DistributedSampler(self.dataset, shuffle=True, seed=cfg.seed)
        self.loader = DataLoader(
            self.dataset,
            batch_size=cfg.batch_size,
            sampler=self.sampler,
            collate_fn=collate,
            num_workers=cfg.workers,
            persistent_workers=True,
        )
        self.epoch = 0

    def step(self, src, dec, tgt):
        tokens = (tgt != PAD).sum().float()
        everywhere = tokens.clone()
        dist.all_reduce(everywhere)
        logits = self.model(src, dec)
        summed = F.cross_entropy(logits.flatten(0, 1), tgt.flatten(), ignore_index=PAD, reduction="sum")
        self.optimizer.zero_grad()
        (summed * self.world / everywhere).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        hits = ((logits.argmax(2) == tgt) & (tgt != PAD)).sum()
        return torch.tensor([summed.item(), hits.item(), tokens.item()], dtype=torch.float64)

    def train_epoch(self):
        self.model.train()
        self.sampler.set_epoch(self.epoch)
        total = torch.zeros(3, dtype=torch.float64)
        for src, dec, tgt in self.loader:
            total += self.step(src, dec, tgt)
        dist.all_reduce(total)
        self.epoch += 1
        return (total[0] / total[2]).item(), (total[1] / total[2]).item(), int(total[2])

    @torch.no_grad()
    def test(self):
        """Teacher-forced accuracy on sequences of the full length, every process takes its part."""
        self.model.eval()
        task = ReverseTask(self.cfg, self.cfg.seed + 77)
        task.max_len = self.cfg.longest
        batch = collate([task[i] for i in range(self.rank, 200, self.world)])
        src, dec, tgt = batch
        hits = ((self.model.module(src, dec).argmax(2) == tgt) & (tgt != PAD)).sum()
        count = torch.tensor([hits.item(), (tgt != PAD).sum().item()], dtype=torch.float64)
        dist.all_reduce(count)
        return (count[0] / count[1]).item()

    def fit(self):
        for number, stage in enumerate(self.cfg.stages):
            self.dataset.max_len = stage.max_len
            for _ in range(stage.epochs):
                loss, accuracy, tokens = self.train_epoch()
                if self.rank == 0:
                    print(f"stage {number} epoch {self.epoch}: loss {loss:.4f} accuracy {accuracy:.3f} ({tokens} tokens)", flush=True)
        final = self.test()
        if self.rank == 0:
            print(f"accuracy at full length {final:.3f}")
            torch.save(self.model.module.state_dict(), "reverser.pt")
        dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Trainer(Config(batch_size=args.batch_size, workers=args.workers)).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
