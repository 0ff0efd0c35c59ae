"""Hogwild word vectors: a parent, two forked trainers, one shared table (nproc 1)."""
import argparse

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F


class SkipGram(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.center, self.context = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        nn.init.zeros_(self.context.weight)

    def forward(self, w, c, neg):
        v = self.center(w)
        pos = (v * self.context(c)).sum(1)
        n = torch.bmm(self.context(neg), v.unsqueeze(2)).squeeze(2)
        return -(F.logsigmoid(pos) + F.logsigmoid(-n).sum(1)).mean()

    def load_vectors(self, table):
        """Starts from given vectors (here: hashed, in practice from a file)."""
        self.center.weight.data = table.clone()
        self.context.weight.data = 0.1 * table.flip(0)


def corpus(n, vocab, seed):
    g = torch.Generator().manual_seed(seed)
    topic = torch.randint(0, 6, (n,), generator=g)
    width = vocab // 6
    pick = lambda: topic * width + torch.randint(0, width, (n,), generator=g)
    return pick(), pick()


def worker(index, model, args):
    torch.manual_seed(100 + index)
    torch.set_num_threads(1)
    w, c = corpus(args.pairs, args.vocab, index)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        total = 0.0
        for i in range(0, len(w), args.batch):
            ww, cc = w[i : i + args.batch], c[i : i + args.batch]
            loss = model(ww, cc, torch.randint(0, args.vocab, (len(ww), 4)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"worker {index} epoch {epoch}: loss {total / (len(w) / args.batch):.4f}", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--vocab", type=int, default=120)
    p.add_argument("--dim", type=int, default=16)
    p.add_argument("--pairs", type=int, default=4000)
    p.add_argument("--batch", type=int, default=50)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--lr", type=float, default=1.0)
    args = p.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = SkipGram(args.vocab, args.dim)
    table = 0.2 * torch.randn(args.vocab, args.dim)
    model.share_memory()
    model.load_vectors(table)
    ctx = mp.get_context("fork")
    workers = [ctx.Process(target=worker, args=(i, model, args)) for i in range(2)]
    for p in workers:
        p.start()
    for p in workers:
        p.join()
    with torch.no_grad():
        w, c = corpus(500, args.vocab, 9)
        print(f"held-out loss {model(w, c, torch.randint(0, args.vocab, (500, 4))).item():.4f}")
    torch.save(model.state_dict(), "/tmp/skipgram.pt")


if __name__ == "__main__":
    main()
