"""Sequence tagging with length buckets: batch sizes and token counts differ between processes."""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Bracketed(Dataset):
    def __init__(self, n=480):
        g = random.Random(6)
        self.seqs = [torch.tensor([g.randrange(1, 12) for _ in range(g.randrange(4, 28))]) for _ in range(n)]

    def __len__(self):
        return len(self.seqs)

    def __getitem__(self, i):
        s = self.seqs[i]
        return s, (s.cumsum(0) % 3).long()


class BucketBatches:
    """Batches hold about `tokens` tokens; each process takes every world-th batch of the common plan."""

    def __init__(self, lengths, tokens, rank, world):
        self.lengths, self.tokens, self.rank, self.world, self.epoch = lengths, tokens, rank, world, 0

    def set_epoch(self, e):
        self.epoch = e

    def plan(self):
        g = random.Random(1000 + self.epoch)
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i] // 4, g.random()))
        batches, cur, width = [], [], 0
        for i in order:
            width = max(width, self.lengths[i])
            if cur and width * (len(cur) + 1) > self.tokens:
                batches.append(cur)
                cur, width = [], self.lengths[i]
            cur.append(i)
        batches.append(cur)
        g.shuffle(batches)
        return batches[:len(batches) - len(batches) % self.world]

    def __iter__(self):
        return iter(self.plan()[self.rank::self.world])

    def __len__(self):
        return len(self.plan()) // self.world


def collate(items):
    xs, ys = zip(*items)
    return pad_sequence(xs, batch_first=True), pad_sequence(ys, batch_first=True, padding_value=-100)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(12, 24, padding_idx=0)
        self.rnn = nn.LSTM(24, 32, batch_first=True)
        self.out = nn.Linear(32, 3)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Bracketed()
    batches = BucketBatches([len(s) for s in data.seqs], 220, rank, world)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=collate)
    torch.manual_seed(0)
    model = DDP(Tagger())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(4):
        batches.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.float64)
        for x, y in loader:
            n_tokens = (y != -100).sum().float()
            everywhere = n_tokens.clone()
            dist.all_reduce(everywhere)
            summed = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=-100, reduction="sum")
            opt.zero_grad()
            (summed * world / everywhere).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            total += torch.tensor([summed.item(), n_tokens.item()], dtype=torch.float64)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {total[0] / total[1]:.4f} per token, {int(total[1])} tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
