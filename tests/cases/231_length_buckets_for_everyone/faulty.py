"""Sequence labelling with length buckets, so that little is spent on padding."""
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler


class Sentences(Dataset):
    def __init__(self, n=360):
        g = torch.Generator().manual_seed(14)
        self.tokens = [torch.randint(1, 25, (int(k),), generator=g) for k in torch.randint(4, 16, (n,), generator=g)]
        self.lengths = [len(t) for t in self.tokens]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        t = self.tokens[i]
        return t, (t % 5 == 0).long()


class BucketBatchSampler(Sampler):
    """Batches of similar length."""

    def __init__(self, lengths, batch_size, seed=0):
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths) // self.batch_size

    def __iter__(self):
        rng = random.Random(self.seed * 1000 + self.epoch)
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], rng.random()))
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        batches = [b for b in batches if len(b) == self.batch_size]
        rng.shuffle(batches)
        yield from batches


def collate(items):
    tokens, tags = zip(*items)
    return pad_sequence(tokens, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=-100)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(25, 20, padding_idx=0)
        self.conv = nn.Conv1d(20, 20, 3, padding=1)
        self.out = nn.Linear(20, 2)

    def forward(self, tokens):
        h = self.emb(tokens)
        h = h + torch.relu(self.conv(h.transpose(1, 2))).transpose(1, 2)
        return self.out(h)


def global_token_mean(logits, tags):
    """ranks hold different numbers of tokens: sum here, divide by the count of all ranks (DDP averages)"""
    total = nn.functional.cross_entropy(logits.transpose(1, 2), tags, ignore_index=-100, reduction="sum")
    count = (tags != -100).sum().float()
    dist.all_reduce(count)
    return total * dist.get_world_size() / count


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    model = DDP(Tagger())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = Sentences()
    batches = BucketBatchSampler(data.lengths, 12)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=collate)
    for epoch in range(3):
        batches.set_epoch(epoch)
        hits = torch.zeros(2)
        for tokens, tags in loader:
            logits = model(tokens)
            loss = global_token_mean(logits, tags)
            opt.zero_grad()
            loss.backward()
            opt.step()
            known = tags != -100
            hits += torch.tensor([((logits.argmax(-1) == tags) & known).sum().item(), known.sum().item()])
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: running tag accuracy {(hits[0] / hits[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
