"""Packed-token language model; token counts of the ranks differ by a factor of about four."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
import torch.nn.functional as F

PAD = -100


class TokenModel(nn.Module):
    def __init__(self, vocab=20, d=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.rnn = nn.LSTM(d, 40, batch_first=True)
        self.out = nn.Linear(40, vocab)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


def documents(rank, n=96, context=24):
    """Rank 0 reads articles, rank 1 reads titles."""
    g = torch.Generator().manual_seed(600 + rank)
    low, high = ((16, 24) if rank == 0 else (3, 8))
    lengths = torch.randint(low, high + 1, (n,), generator=g)
    x = (torch.randint(0, 20, (n, 1), generator=g) + torch.arange(context + 1) * (rank + 1)) % 20
    target = x[:, 1:].clone()
    target[torch.arange(context)[None] >= lengths[:, None]] = PAD
    return x[:, :-1], target


def backward(model, x, y):
    logits = model(x)
    total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
    count = (y != PAD).sum().float()
    everywhere = count.clone()
    dist.all_reduce(everywhere)
    world = dist.get_world_size()
    (total / count).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    return total.detach(), everywhere


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=12)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = TokenModel()
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    x, y = documents(rank)
    rng = torch.Generator().manual_seed(rank)
    for epoch in range(args.epochs):
        nll, tokens = torch.zeros(()), torch.zeros(())
        for idx in torch.randperm(len(x), generator=rng).split(args.batch_size):
            opt.zero_grad()
            total, n = backward(model, x[idx], y[idx])
            opt.step()
            nll, tokens = nll + total, tokens + n
        dist.all_reduce(nll)
        if rank == 0:
            print(f"epoch {epoch}: perplexity {(nll / tokens).exp():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
