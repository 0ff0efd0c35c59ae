"""Next-character model on a stream of generated lines."""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

ALPHABET = "abcdefghijklmnop "


def corpus(n=512, length=16):
    words = ["bad", "cab", "deaf", "face", "jam", "lamp", "pink", "help", "mob", "nap"]
    rng = random.Random(3)
    lines = []
    while len(lines) < n:
        line = " ".join(rng.choice(words) for _ in range(6))
        lines.append(line[: length + 1])
    return lines


class LineStream(IterableDataset):
    def __init__(self, lines, rank, world, seed=0):
        self.lines, self.rank, self.world = lines, rank, world
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(len(self.lines)))
        random.Random(self.seed + self.epoch).shuffle(order)
        info = get_worker_info()
        if info is None:
            part, parts = 0, 1
        else:
            part, parts = info.id, info.num_workers
        for i in order[part::parts]:
            codes = torch.tensor([ALPHABET.index(c) for c in self.lines[i].ljust(17)])
            yield codes[:-1], codes[1:]


class CharModel(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), hidden)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, len(ALPHABET))

    def forward(self, codes):
        return self.out(self.lstm(self.embed(codes))[0])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--workers", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)

    stream = LineStream(corpus(), rank, world)
    loader = DataLoader(stream, batch_size=args.batch_size, num_workers=args.workers)
    model = DDP(CharModel())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        stream.set_epoch(epoch)
        total = torch.zeros(2)
        for codes, following in loader:
            loss = nn.functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss per character {(total[0] / total[1]).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
