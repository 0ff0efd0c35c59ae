"""Skip-gram word vectors, trained by two workers on one shared table without locks."""
import argparse

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

TOPICS, WORDS = 8, 15
VOCAB = TOPICS * WORDS


def pairs(n, seed):
    """Words of one topic are seen together."""
    g = torch.Generator().manual_seed(seed)
    topic = torch.randint(0, TOPICS, (n,), generator=g)
    centre = topic * WORDS + torch.randint(0, WORDS, (n,), generator=g)
    context = topic * WORDS + torch.randint(0, WORDS, (n,), generator=g)
    stray = torch.rand(n, generator=g) < 0.1
    return centre, torch.where(stray, torch.randint(0, VOCAB, (n,), generator=g), context)


class SkipGram(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.centre, self.context = nn.Embedding(VOCAB, dim, sparse=True), nn.Embedding(VOCAB, dim, sparse=True)
        for table in (self.centre, self.context):
            nn.init.uniform_(table.weight, -0.5, 0.5)

    def forward(self, centre, context, other):
        c = self.centre(centre)
        near = (c * self.context(context)).sum(1)
        far = torch.einsum("bd,bkd->bk", c, self.context(other))
        return -(F.logsigmoid(near) + F.logsigmoid(-far).sum(1)).mean()


@torch.no_grad()
def purity(net):
    """How many nearest neighbours lie in the word's own topic."""
    v = F.normalize(net.centre.weight, dim=1)
    near = (v @ v.T).fill_diagonal_(-2).argmax(1)
    return (near // WORDS == torch.arange(VOCAB) // WORDS).float().mean().item()


def worker(index, net, args, done):
    torch.set_num_threads(1)
    torch.manual_seed(100 + index)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr)
    centre, context = pairs(args.pairs, seed=index)
    for epoch in range(args.epochs):
        total, steps = 0.0, 0
        for rows in torch.randperm(args.pairs).split(args.batch):
            loss = net(centre[rows], context[rows], torch.randint(0, VOCAB, (len(rows), 4)))
            opt.zero_grad()
            loss.backward()
            opt.step()
            total, steps = total + loss.item(), steps + 1
        done.put((index, epoch, total / steps))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--pairs", type=int, default=12_000)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=2.0)
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = SkipGram().share_memory()
    print(f"neighbours in the same topic before: {purity(net):.2f}")
    ctx = mp.get_context("spawn")
    done = ctx.Queue()
    crew = [ctx.Process(target=worker, args=(k, net, args, done)) for k in range(args.workers)]
    for p in crew:
        p.start()
    for _ in range(args.workers * args.epochs):
        index, epoch, loss = done.get(timeout=100)
        print(f"worker {index} epoch {epoch}: loss {loss:.3f}", flush=True)
    for p in crew:
        p.join()
    print(f"neighbours in the same topic after: {purity(net):.2f}")
    torch.save(net.state_dict(), "vectors.pt")
    if any(p.exitcode for p in crew):
        raise SystemExit("a worker failed")


if __name__ == "__main__":
    main()
