"""Sentence-polarity style sequence classification with length-bucketed batches and a length curriculum."""
import logging
import sys
from collections import defaultdict
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler


@dataclass
class Hyper:
    vocab: int = 40
    max_len: int = 32
    batch: int = 24
    bucket_width: int = 4
    curriculum: list = field(default_factory=lambda: [12, 20, 32, 32, 32])  # longest sequence per epoch
    lr: float = 4e-3
    seed: int = 21


class PolaritySet(Dataset):
    """Some symbols are positive, some negative, 'not' (symbol 1) flips the next one; label: sign of the sum."""

    def __init__(self, n, hyper, seed):
        g = torch.Generator().manual_seed(seed)
        value = torch.randint(-2, 3, (hyper.vocab,), generator=torch.Generator().manual_seed(0)).float()
        value[:2] = 0
        self.items = []
        while len(self.items) < n:
            length = int(torch.randint(4, hyper.max_len + 1, (1,), generator=g))
            tokens = torch.randint(1, hyper.vocab, (length,), generator=g)
            flip = torch.ones(length)
            flip[1:][tokens[:-1] == 1] = -1
            total = (value[tokens] * flip).sum().item()
            if abs(total) >= 1:
                self.items.append((tokens, int(total > 0)))
        self.lengths = [len(t) for t, _ in self.items]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    tokens = [t for t, _ in items]
    return (pad_sequence(tokens, batch_first=True), torch.tensor([len(t) for t in tokens]),
            torch.tensor([label for _, label in items]))


class DistributedBucketBatchSampler(Sampler):
    """Groups of `world_size` equally sized batches from one length bucket, one batch for each rank.

    The shuffling depends on (seed, epoch) only, so all ranks build the same list of groups: the batch counts agree and
    batches worked on at the same time hold sequences of similar length. Left-overs of a bucket wait for another epoch.
    """

    def __init__(self, lengths, batch_size, width, rank, world_size, seed):
        self.lengths, self.batch_size, self.width = lengths, batch_size, width
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.epoch, self.longest = 0, max(lengths)

    def set_epoch(self, epoch, longest):
        self.epoch, self.longest = epoch, longest

    def _groups(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        buckets = defaultdict(list)
        for i in torch.randperm(len(self.lengths), generator=g).tolist():
            if self.lengths[i] <= self.longest:
                buckets[self.lengths[i] // self.width].append(i)
        size, groups = self.batch_size * self.world_size, []
        for key in sorted(buckets):
            members = buckets[key]
            groups += [members[k:k + size] for k in range(0, len(members) - size + 1, size)]
        return [groups[k] for k in torch.randperm(len(groups), generator=g).tolist()]

    def __iter__(self):
        for group in self._groups():
            yield group[self.rank::self.world_size]

    def __len__(self):
        return len(self._groups())


class Classifier(nn.Module):
    def __init__(self, vocab, dim=32, hidden=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.rnn = nn.GRU(dim, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(2 * hidden, 2))

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        _, last = self.rnn(packed)
        return self.head(torch.cat([last[0], last[1]], dim=1))


@torch.no_grad()
def evaluate(model, data, rank, world):
    model.eval()
    mine = sorted(range(rank, len(data), world), key=data.lengths.__getitem__)
    right = torch.zeros(2, dtype=torch.long)
    for k in range(0, len(mine), 64):
        tokens, lengths, labels = collate([data[i] for i in mine[k:k + 64]])
        right += torch.tensor([(model(tokens, lengths).argmax(1) == labels).sum().item(), len(labels)])
    dist.all_reduce(right)
    model.train()
    return right[0].item() / right[1].item()


def main():
    hp = Hyper()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(stream=sys.stdout, level=logging.INFO if rank == 0 else logging.WARNING,
                        format="%(levelname).1s %(message)s")
    train, valid = PolaritySet(1500, hp, seed=1), PolaritySet(301, hp, seed=2)
    sampler = DistributedBucketBatchSampler(train.lengths, hp.batch, hp.bucket_width, rank, world, hp.seed)
    # The batch sampler is iterated in this process, so the worker that is kept alive never needs to know the epoch.
    loader = DataLoader(train, batch_sampler=sampler, collate_fn=collate, num_workers=1, persistent_workers=True)

    torch.manual_seed(hp.seed)
    model = DDP(Classifier(hp.vocab))
    torch.manual_seed(hp.seed + 1 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=hp.lr)
    criterion = nn.CrossEntropyLoss()

    for epoch, longest in enumerate(hp.curriculum):
        sampler.set_epoch(epoch, longest)
        total, steps = torch.zeros(()), 0
        for tokens, lengths, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(tokens, lengths), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.detach()
            steps += 1
        dist.all_reduce(total)
        accuracy = evaluate(model.module, valid, rank, world)
        logging.info("epoch %d (length <= %d) %d steps loss %.4f valid accuracy %.3f",
                     epoch, longest, steps, total.item() / (steps * world), accuracy)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
