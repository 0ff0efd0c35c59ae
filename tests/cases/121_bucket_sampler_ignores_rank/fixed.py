"""Tagging sequences of different lengths; batches are made of sequences of about equal length."""
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler


class Brackets(Dataset):
    """Tag every symbol with the nesting depth (0..3) at its place."""

    def __init__(self, n=512):
        rng = random.Random(9)
        self.items = []
        for _ in range(n):
            depth, symbols, tags = 0, [], []
            for _ in range(rng.randint(6, 24)):
                up = depth == 0 or (depth < 3 and rng.random() < 0.5)
                depth += 1 if up else -1
                symbols.append(1 if up else 2)
                tags.append(depth)
            self.items.append((torch.tensor(symbols), torch.tensor(tags)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class BucketBatches(Sampler):
    """Sorts by length, cuts into batches, shuffles the batches anew in every epoch."""

    def __init__(self, lengths, batch, rank, world, seed=0):
        self.lengths, self.batch, self.rank, self.world, self.seed = lengths, batch, rank, world, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = random.Random(self.seed + self.epoch)
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], rng.random()))
        batches = [order[k : k + self.batch] for k in range(0, len(order), self.batch)]
        rng.shuffle(batches)
        yield from batches[self.rank :: self.world]


def collate(items):
    return pad_sequence([s for s, _ in items], True), pad_sequence([t for _, t in items], True, padding_value=-100)


class DepthTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(3, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 32, batch_first=True)
        self.out = nn.Linear(32, 4)

    def forward(self, x):
        return self.out(self.lstm(self.emb(x))[0])


def synchronise(params, tokens):
    """Gradients are sums over the tokens of a rank: add them up and divide by the tokens of all ranks."""
    bucket = torch.cat([p.grad.flatten() for p in params] + [torch.tensor([float(tokens)])])
    dist.all_reduce(bucket)
    for p, piece in zip(params, bucket[:-1].split([p.numel() for p in params])):
        p.grad.copy_(piece.view_as(p) / bucket[-1])


def main(epochs=6):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DepthTagger()
    params = list(model.parameters())
    for p in params:
        dist.broadcast(p.data, 0)
    opt = torch.optim.Adam(params, lr=1e-2)
    data = Brackets()
    batches = BucketBatches([len(s) for s, _ in data.items], 16, rank, world)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=collate)

    for epoch in range(epochs):
        batches.set_epoch(epoch)
        steps, total, tokens = 0, 0.0, 0
        for x, tags in loader:
            n = int((tags != -100).sum())
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), tags.flatten(), reduction="sum")
            opt.zero_grad()
            loss.backward()
            synchronise(params, n)
            opt.step()
            steps, total, tokens = steps + 1, total + loss.item(), tokens + n
        print(f"[rank {rank}] epoch {epoch}: {steps} steps, own loss {total / tokens:.4f}", flush=True)
    if rank == 0:
        torch.save(model.state_dict(), "depth.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
