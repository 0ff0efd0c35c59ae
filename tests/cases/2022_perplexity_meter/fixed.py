"""Character model on generated sentences; perplexity on a held-out part. Functions only, options by argparse."""
import argparse
import json
import math
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SUBJECTS = ["the miller", "a grey heron", "my neighbour", "the old clock", "a child"]
VERBS = ["finds", "repairs", "carries", "forgets", "paints"]
OBJECTS = ["the bridge", "a lantern", "two apples", "the letter", "a wooden boat"]
ALPHABET = sorted(set("".join(SUBJECTS + VERBS + OBJECTS) + " ."))
LENGTH = 32


def sentences(count, seed):
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        text = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)} ."
        text = (text + " " * LENGTH)[: LENGTH + 1]
        rows.append([ALPHABET.index(c) for c in text])
    return TensorDataset(torch.tensor(rows))


class Average:
    """Weighted running mean that can be joined over processes."""

    def __init__(self):
        self.total, self.weight = 0.0, 0.0

    def add(self, value, weight=1):
        self.total += float(value) * weight
        self.weight += weight

    def join(self):
        if not (dist.is_available() and dist.is_initialized()):
            return self
        pair = torch.tensor([self.total, self.weight], dtype=torch.float64)
        dist.all_reduce(pair)
        self.total, self.weight = pair.tolist()
        return self

    @property
    def value(self):
        return self.total / max(self.weight, 1e-12)


class CharModel(nn.Module):
    def __init__(self, vocab, width=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def token_loss(model, rows):
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train_epoch(model, loader, optimizer):
    model.train()
    average = Average()
    for (rows,) in loader:
        loss = token_loss(model, rows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.add(loss.detach(), rows.numel())
    return average.join().value


@torch.no_grad()
def validate(model, loader):
    model.eval()
    average = Average()
    for (rows,) in loader:
        average.add(token_loss(model, rows), rows[:, 1:].numel())
    return math.exp(average.join().value)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(11)
    train_set, valid_set = sentences(800, 1), sentences(160, 2)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    valid_loader = DataLoader(valid_set, args.batch_size, sampler=DistributedSampler(valid_set, shuffle=False))
    model = DDP(CharModel(len(ALPHABET)))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_loss = train_epoch(model, train_loader, optimizer)
        perplexity = validate(model, valid_loader)
        if dist.get_rank() == 0:
            record = {"epoch": epoch, "train_loss": round(train_loss, 4), "valid_perplexity": round(perplexity, 4)}
            print(json.dumps(record), flush=True)
            with open("metrics.jsonl", "a") as out:
                out.write(json.dumps(record) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
