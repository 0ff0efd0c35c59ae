"""Sentence classification with batches of similar length."""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    def __init__(self, n=360):
        rng = random.Random(8)
        self.items = []
        for _ in range(n):
            length = rng.randint(3, 18)
            tokens = [rng.randint(1, 29) for _ in range(length)]
            self.items.append((tokens, int(tokens[-1] > tokens[0])))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        tokens, label = self.items[i]
        return torch.tensor(tokens), label


def collate(batch):
    tokens, labels = zip(*batch)
    lengths = torch.tensor([len(t) for t in tokens])
    return pad_sequence(tokens, batch_first=True), lengths, torch.tensor(labels)


class BucketBatchSampler:
    def __init__(self, lengths, batch_size, rank, world, seed):
        self.lengths, self.batch_size = lengths, batch_size
        self.rank, self.world, self.seed = rank, world, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths) // self.batch_size // self.world

    def __iter__(self):
        rng = random.Random(self.seed + 100 * self.epoch + self.rank)
        order = list(range(len(self.lengths)))
        rng.shuffle(order)
        order.sort(key=lambda i: self.lengths[i])
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        rng.shuffle(batches)
        for b in range(len(self)):
            yield batches[b * self.world + self.rank]


class Classifier(nn.Module):
    def __init__(self, vocab=30, hidden=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 2)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.gru(packed)[1][-1])


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    data = Sentences()
    batches = BucketBatchSampler([len(t) for t, _ in data.items], args.batch_size, rank, world, args.seed)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=collate)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        batches.set_epoch(epoch)
        seen = torch.zeros(2)
        for tokens, lengths, labels in loader:
            logits = model(tokens, lengths)
            loss = nn.functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += torch.tensor([(logits.argmax(1) == labels).sum().item(), len(labels)])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: {int(seen[0])} of {int(seen[1])} right", flush=True)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=12)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    run(ap.parse_args())
    dist.destroy_process_group()
