"""Lock-free training of a small tagger by several processes."""
import argparse
import time

import torch
import torch.nn as nn
import torch.multiprocessing as mp


class Tagger(nn.Module):
    def __init__(self, vocab=60, tags=6):
        super().__init__()
        self.table = nn.Embedding(vocab, 16)
        self.rnn = nn.GRU(16, 24, batch_first=True)
        self.proj = nn.Linear(24, tags)

    def forward(self, tokens):
        return self.proj(self.rnn(self.table(tokens))[0])


def corpus(n=1200, length=10):
    g = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 60, (n, length), generator=g)
    prev = torch.cat([torch.zeros(n, 1, dtype=torch.long), tokens[:, :-1]], 1)
    return tokens, (tokens // 10 + prev // 30) % 6


def worker(rank, args, model, tokens, tags):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(args.seed + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        pick = torch.randint(0, len(tokens), (args.batch_size,), generator=gen)
        logits = model(tokens[pick])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tags[pick].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"worker {rank}: last loss {loss.item():.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--num-processes", type=int, default=2)
    ap.add_argument("--steps", type=int, default=120)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1.0)
    ap.add_argument("--seed", type=int, default=11)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    model = Tagger()
    model.share_memory()
    tokens, tags = corpus()
    begin = time.time()
    mp.spawn(worker, args=(args, model, tokens[:1000], tags[:1000]), nprocs=args.num_processes)
    with torch.no_grad():
        hit = (model(tokens[1000:]).argmax(-1) == tags[1000:]).float().mean()
    print(f"held-out accuracy {hit:.3f} after {time.time() - begin:.1f} s")


if __name__ == "__main__":
    main()
