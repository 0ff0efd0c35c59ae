"""Character RNN on a stream of generated words, read by background workers."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def word(i, length=9):
    g = torch.Generator().manual_seed(4000 + i)
    syllable = torch.randint(0, 14, (3,), generator=g)
    return syllable.repeat(length // 3 + 1)[: length + 1]


class WordStream(IterableDataset):
    def __init__(self, total, rank, world):
        self.total, self.rank, self.world = total, rank, world
        self.epoch = 0

    def __iter__(self):
        order = torch.randperm(self.total, generator=torch.Generator().manual_seed(self.epoch))
        info = get_worker_info()
        mine = order[self.rank :: self.world][info.id :: info.num_workers]
        for i in mine.tolist():
            w = word(i)
            yield w[:-1], w[1:]


class CharRNN(nn.Module):
    def __init__(self, chars=14, width=32):
        super().__init__()
        self.emb = nn.Embedding(chars, width)
        self.rnn = nn.RNN(width, width, batch_first=True)
        self.out = nn.Linear(width, chars)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.out(h)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--words", type=int, default=320)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=10)
    ap.add_argument("--workers", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2)

    stream = WordStream(args.words, rank, world)
    loader = DataLoader(stream, batch_size=args.batch_size, num_workers=args.workers)
    model = DDP(CharRNN())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(args.epochs):
        stream.epoch = epoch
        total, n = 0.0, 0
        for ids, target in loader:
            loss = nn.functional.cross_entropy(model(ids).transpose(1, 2), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
            n += 1
        if rank == 0:
            print(f"epoch {epoch}: loss {total / n:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
