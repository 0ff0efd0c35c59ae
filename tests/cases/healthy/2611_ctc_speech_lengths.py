"""Small speech recogniser: strided convolutions, a GRU and CTC on utterances of variable length."""
import argparse
import math
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

TOKENS = 8          # 0 is the blank
SAMPLES_PER_TOKEN = 64


class Utterances(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.texts = [rng.integers(1, TOKENS, size=int(rng.integers(3, 13))) for _ in range(n)]
        self.cache = {}
        self.cache_limit = n // 2

    def __len__(self):
        return len(self.texts)

    def length(self, i):
        return len(self.texts[i]) * SAMPLES_PER_TOKEN

    def _wave(self, i):
        rng = np.random.default_rng(1000 + i)
        t = np.arange(SAMPLES_PER_TOKEN)
        parts = [np.sin(2 * np.pi * t * (0.02 + 0.05 * k) + rng.uniform(0, 6.28)) for k in self.texts[i]]
        return torch.from_numpy((np.concatenate(parts) + 0.1 * rng.standard_normal(len(parts) * len(t))).astype("float32"))

    def __getitem__(self, i):
        wave = self.cache.get(i)
        if wave is None:
            wave = self._wave(i)
            if len(self.cache) < self.cache_limit:
                self.cache[i] = wave
        return wave, torch.from_numpy(self.texts[i])


class BucketBatches(Sampler):
    """Batches of similar length, the same list on every rank, dealt out round robin; as many for each."""

    def __init__(self, data, batch, rank, world, seed=0):
        self.data, self.batch, self.rank, self.world, self.seed = data, batch, rank, world, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.data) // self.batch // self.world

    def __iter__(self):
        rng = random.Random(self.seed + self.epoch)
        order = sorted(range(len(self.data)), key=lambda i: (self.data.length(i) + rng.uniform(0, 60), i))
        batches = [order[k:k + self.batch] for k in range(0, len(order) - self.batch + 1, self.batch)]
        rng.shuffle(batches)
        yield from batches[self.rank:len(self) * self.world:self.world]


def collate(items):
    waves, texts = zip(*items)
    lens = torch.tensor([len(w) for w in waves])
    tlens = torch.tensor([len(t) for t in texts])
    return nn.utils.rnn.pad_sequence(waves, batch_first=True), lens, torch.cat(texts), tlens


class Recogniser(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.c1 = nn.Conv1d(1, 32, 11, stride=4, padding=5)
        self.c2 = nn.Conv1d(32, dim, 9, stride=4, padding=4)
        self.norm = nn.LayerNorm(dim)
        self.gru = nn.GRU(dim, dim // 2, bidirectional=True, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(dim, TOKENS)

    def forward(self, waves, lens):
        x = F.gelu(self.c2(F.gelu(self.c1(waves[:, None]))))
        lens = (lens + 15) // 16
        x = self.norm(x.transpose(1, 2))
        packed = nn.utils.rnn.pack_padded_sequence(x, lens, batch_first=True, enforce_sorted=False)
        x, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.out(self.drop(x)).log_softmax(-1), lens


def edits(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (x != y))
    return row[-1]


@torch.no_grad()
def character_errors(model, data, rank, world):
    model.eval()
    mine = list(range(rank, len(data), world))
    tally = torch.zeros(2, dtype=torch.float64)
    for k in range(0, len(mine), 16):
        waves, lens, texts, tlens = collate([data[i] for i in mine[k:k + 16]])
        logp, olens = model(waves, lens)
        for path, n, text in zip(logp.argmax(-1), olens, texts.split(tlens.tolist())):
            hyp = [c for c in torch.unique_consecutive(path[:n]).tolist() if c]
            tally += torch.tensor([edits(hyp, text.tolist()), len(text)], dtype=torch.float64)
    dist.all_reduce(tally)
    model.train()
    return (tally[0] / tally[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(17)
    model = DDP(Recogniser())
    torch.manual_seed(100 + rank)
    train, test = Utterances(400, 1), Utterances(61, 2)
    batches = BucketBatches(train, 8, rank, world)
    loader = DataLoader(train, batch_sampler=batches, collate_fn=collate)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    total = args.epochs * len(batches)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / 20) * 0.5 * (1 + math.cos(math.pi * s / total)))
    for epoch in range(args.epochs):
        batches.set_epoch(epoch)
        run = torch.zeros(2)
        for waves, lens, texts, tlens in loader:
            logp, olens = model(waves, lens)
            loss = F.ctc_loss(logp.transpose(0, 1), texts, olens, tlens, zero_infinity=True)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            sched.step()
            run += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(run)
        cer = character_errors(model.module, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} ctc {run[0] / run[1]:.3f} CER {cer:.3f} cached {len(train.cache)}", flush=True)
    if rank == 0:
        os.makedirs("ckpt", exist_ok=True)
        torch.save(model.module.state_dict(), "ckpt/asr.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
