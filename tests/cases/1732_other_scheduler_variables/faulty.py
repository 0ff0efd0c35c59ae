"""Sequence tagging with a bidirectional GRU; runs alone or in a job of several tasks."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Context:
    def __init__(self):
        self.rank = int(os.environ.get("SLURM_PROCID", 0))
        self.world = int(os.environ.get("SLURM_NTASKS", 1))
        if self.world > 1:
            dist.init_process_group("gloo", rank=self.rank, world_size=self.world)

    def wrap(self, net):
        return DDP(net) if self.world > 1 else net

    def sampler(self, data, shuffle):
        return DistributedSampler(data, self.world, self.rank, shuffle=shuffle) if self.world > 1 else None

    def sum(self, t):
        if self.world > 1:
            dist.all_reduce(t)
        return t

    def print(self, *args):
        if self.rank == 0:
            print(*args, flush=True)

    def close(self):
        if self.world > 1:
            dist.destroy_process_group()


class Tagger(nn.Module):
    def __init__(self, vocab=30, width=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, 2)

    def forward(self, tokens):
        return self.out(self.rnn(self.emb(tokens))[0])


def tagged(n=256, length=12):
    g = torch.Generator().manual_seed(61)
    tokens = torch.randint(0, 30, (n, length), generator=g)
    left = torch.cat([torch.zeros(n, 1, dtype=torch.long), tokens[:, :-1]], 1)
    return TensorDataset(tokens, (tokens > left).long())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=4e-3)
    args = ap.parse_args()
    ctx = Context()
    torch.manual_seed(5)
    model = ctx.wrap(Tagger())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = tagged()
    sampler = ctx.sampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, shuffle=sampler is None)
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        hits = torch.zeros(2)
        for tokens, tags in loader:
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tags.flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            hits += torch.tensor([(logits.argmax(2) == tags).sum().item(), tags.numel()])
        ctx.sum(hits)
        ctx.print(f"epoch {epoch}: tag accuracy {(hits[0] / hits[1]).item():.3f} on {ctx.world} task(s)")
    ctx.close()


if __name__ == "__main__":
    main()
