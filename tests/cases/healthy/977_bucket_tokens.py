"""Length buckets with a token budget: batch sizes differ by step and by rank, the loss is normalised by the tokens of all ranks."""
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

PAD, VOCAB, BUDGET = 0, 18, 160


class Sentences(Dataset):
    def __init__(self, n=420):
        g = torch.Generator().manual_seed(23)
        self.lengths = torch.randint(4, 25, (n,), generator=g).tolist()
        self.rows = []
        for k in self.lengths:
            step = 1 + int(torch.randint(0, 3, (1,), generator=g))
            first = int(torch.randint(0, VOCAB - 1, (1,), generator=g))
            self.rows.append(1 + (first + step * torch.arange(k + 1)) % (VOCAB - 1))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class TokenBatches(Sampler):
    def __init__(self, lengths, budget, rank, world, seed=0):
        self.lengths, self.budget, self.rank, self.world, self.seed, self.epoch = lengths, budget, rank, world, seed, 0
        self.batches = self._plan()

    def _plan(self):
        rng = random.Random(self.seed + self.epoch)  # the same on every rank: one plan, dealt out
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], rng.random()))
        batches, current, longest = [], [], 0
        for i in order:
            longest_new = max(longest, self.lengths[i])
            if current and longest_new * (len(current) + 1) > self.budget:
                batches.append(current)
                current, longest_new = [], self.lengths[i]
            current.append(i)
            longest = longest_new
        batches.append(current)
        rng.shuffle(batches)
        keep = len(batches) - len(batches) % self.world
        return batches[self.rank : keep : self.world]

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.batches = self._plan()

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 24, padding_idx=PAD)
        self.rnn = nn.GRU(24, 48, batch_first=True)
        self.out = nn.Linear(48, VOCAB)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)
    data = Sentences()
    sampler = TokenBatches(data.lengths, BUDGET, rank, world, seed=1)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=lambda rows: pad_sequence(rows, batch_first=True, padding_value=PAD))
    model = DDP(LM())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total, tokens = 0.0, 0.0
        for rows in loader:
            x, y = rows[:, :-1], rows[:, 1:]
            count = (y != PAD).sum().float()
            dist.all_reduce(count)
            nll = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=PAD, reduction="sum")
            loss = nll * world / count
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            total += nll.item()
            tokens += count.item()
        both = torch.tensor([total])
        dist.all_reduce(both)
        if rank == 0:
            print(f"epoch {epoch}: {len(loader)} batches, nll per token {both.item() / tokens:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
