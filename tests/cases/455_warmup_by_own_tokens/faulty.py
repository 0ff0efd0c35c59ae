"""Token-based warm-up for a bag-of-tokens model."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR


class TokenBudget:
    """progress of the training, in tokens"""

    def __init__(self, warmup, total):
        self.warmup, self.total, self.seen = warmup, total, 0

    def add(self, n):
        self.seen += n

    def factor(self, _epoch):
        if self.seen < self.warmup:
            return max(0.02, self.seen / self.warmup)
        return max(0.1, 1 - (self.seen - self.warmup) / (self.total - self.warmup))


class Bag(nn.Module):
    def __init__(self, vocab=200, dim=20, topics=6):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(vocab, dim), nn.Linear(dim, topics)

    def forward(self, tokens, offsets):
        return self.out(self.bag(tokens, offsets))


def documents(rank, batch=16):
    """rank 0 reads abstracts, rank 1 full texts"""
    g = torch.Generator().manual_seed(rank)
    low, high = (8, 20) if rank == 0 else (40, 80)
    while True:
        topic = torch.randint(0, 6, (batch,), generator=g)
        length = torch.randint(low, high, (batch,), generator=g)
        tokens = torch.cat([(torch.randint(0, 60, (int(n),), generator=g) + 25 * t) % 200 for n, t in zip(length, topic)])
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), length.cumsum(0)[:-1]])
        yield tokens, offsets, topic


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DDP(Bag())
    opt = torch.optim.Adam(model.parameters(), lr=0.03)
    budget = TokenBudget(warmup=15_000, total=60_000)
    sched = LambdaLR(opt, budget.factor)
    for step, (tokens, offsets, topic) in enumerate(documents(rank)):
        loss = nn.functional.cross_entropy(model(tokens, offsets), topic)
        opt.zero_grad()
        loss.backward()
        opt.step()
        budget.add(len(tokens) * world)
        sched.step()
        if step % 10 == 9:
            mean = loss.detach()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} loss {mean.item() / world:.4f}")
        if step == 49:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
