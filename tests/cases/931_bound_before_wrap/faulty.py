"""Sequence tagger: the objective is chosen by name from a registry."""
import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, TAGS, LENGTH = 40, 5, 12
OBJECTIVES = {}


def objective(name):
    def register(fn):
        OBJECTIVES[name] = fn
        return fn
    return register


@objective("ce")
def cross_entropy(net, tokens, tags):
    return F.cross_entropy(net(tokens).flatten(0, 1), tags.flatten())


@objective("smooth")
def smoothed(net, tokens, tags, eps=0.05):
    return F.cross_entropy(net(tokens).flatten(0, 1), tags.flatten(), label_smoothing=eps)


class Tagger(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, TAGS)

    def forward(self, tokens):
        return self.out(self.rnn(self.embed(tokens))[0])


def sentences(n, seed):
    gen = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (n, LENGTH), generator=gen)
    return TensorDataset(tokens, (tokens + tokens.roll(1, 1)) % TAGS)


class Trainer:
    def __init__(self, net, args):
        self.args = args
        self.rank = dist.get_rank()
        self.objective = functools.partial(OBJECTIVES[args.objective], net)
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)

    def fit(self, train, dev):
        sampler = DistributedSampler(train, seed=self.args.seed)
        loader = DataLoader(train, batch_size=self.args.batch_size, sampler=sampler)
        for epoch in range(self.args.epochs):
            sampler.set_epoch(epoch)
            self.model.train()
            total = torch.zeros(2)
            for tokens, tags in loader:
                self.optimizer.zero_grad()
                loss = self.objective(tokens, tags)
                loss.backward()
                self.optimizer.step()
                total += torch.tensor([loss.item() * len(tokens), len(tokens)])
            dist.all_reduce(total)
            accuracy = self.evaluate(dev)
            if self.rank == 0:
                print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}, dev accuracy {accuracy:.3f}")

    @torch.no_grad()
    def evaluate(self, dev):
        self.model.eval()
        mine = range(self.rank, len(dev), dist.get_world_size())
        tokens, tags = dev[list(mine)]
        hits = (self.model(tokens).argmax(-1) == tags).sum()
        counts = torch.tensor([float(hits), float(tags.numel())])
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--objective", default="smooth", choices=sorted(OBJECTIVES))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(args.seed)
    Trainer(Tagger(), args).fit(sentences(320, 1), sentences(80, 2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
