"""Rank 0 tokenizes the corpus before training; the other ranks wait for it."""
import argparse
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def tokenize(lines, delay):
    vocab, rows = {}, []
    for i, line in enumerate(lines):
        rows.append([vocab.setdefault(w, len(vocab)) for w in line.split()])
        if i % 40 == 0:
            time.sleep(delay)  # stands for the slow part: remote storage
    return torch.tensor(rows), len(vocab)


class Gate(nn.Module):
    def __init__(self, vocab, width=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.out(self.emb(ids))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--timeout", type=float, default=120.0, help="seconds before a collective gives up")
    ap.add_argument("--delay", type=float, default=0.8)
    args = ap.parse_args()
    # fail fast if a rank dies
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    rank = dist.get_rank()
    if rank == 0:
        lines = [f"w{i % 7} w{(i + 1) % 7} w{(i + 2) % 7} w{(i + 3) % 7}" for i in range(400)]
        ids, size = tokenize(lines, args.delay)
        torch.save({"ids": ids, "size": size}, "corpus.pt")
    dist.barrier()
    corpus = torch.load("corpus.pt")
    torch.manual_seed(0)
    model = DDP(Gate(corpus["size"]))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(corpus["ids"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (ids,) in loader:
            loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
