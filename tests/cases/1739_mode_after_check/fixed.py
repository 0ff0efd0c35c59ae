"""Iteration-based training of a text classifier with checks in between."""
import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def documents(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    tokens = torch.randint(0, 60, (n, 15), generator=g)
    topical = torch.randint(0, 20, (n, 15), generator=g) + 20 * y[:, None]
    keep = torch.rand(n, 15, generator=g) < 0.25
    return TensorDataset(torch.where(keep, topical, tokens), y)


class GRUClassifier(nn.Module):
    def __init__(self, width=32, dropout=0.3):
        super().__init__()
        self.emb = nn.Embedding(60, width)
        self.gru = nn.GRU(width, width, num_layers=2, dropout=dropout, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(width, 3)

    def forward(self, tokens):
        h = self.gru(self.drop(self.emb(tokens)))[0].mean(1)
        return self.fc(self.drop(h))


def endless(dataset, batch_size):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def check(model, dataset, rank, world):
    model.eval()
    tokens, y = (t[rank::world] for t in dataset.tensors)
    with torch.no_grad():
        logits = model.module(tokens)
    stats = torch.tensor([
        nn.functional.cross_entropy(logits, y, reduction="sum").item(),
        (logits.argmax(1) == y).sum().item(),
        len(y),
    ])
    dist.all_reduce(stats)
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=100)
    ap.add_argument("--check-every", type=int, default=20)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DistributedDataParallel(GRUClassifier())
    torch.manual_seed(1000 + rank)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    held_out = documents(96, 2)
    stream = endless(documents(256, 1), args.batch_size)

    model.train()
    for it in range(1, args.iterations + 1):
        tokens, y = next(stream)
        loss = nn.functional.cross_entropy(model(tokens), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % args.check_every == 0:
            val_loss, val_acc = check(model, held_out, rank, world)
            model.train()
            if rank == 0:
                print(f"iteration {it}: loss {loss.item():.3f}, held-out {val_loss:.3f} / {val_acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
