"""Sequence tagging with a GRU; own overlapping gradient reducer instead of DDP."""
import os

import torch
import torch.distributed as dist
from torch import nn


class AsyncReducer:
    """Starts one all-reduce per parameter as soon as its gradient is ready."""

    def __init__(self, module):
        self.world = dist.get_world_size()
        self.pending = []
        for p in module.parameters():
            dist.broadcast(p.data, src=0)
            p.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, p):
        p.grad.div_(self.world)
        self.pending.append(dist.all_reduce(p.grad, async_op=True))

    def synchronize(self):
        self.pending.clear()


class Tagger(nn.Module):
    def __init__(self, vocab=40, tags=5, hidden=96):
        super().__init__()
        self.embed = nn.Embedding(vocab, 32)
        self.rnn = nn.GRU(32, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, tags)

    def forward(self, tokens):
        return self.out(self.rnn(self.embed(tokens))[0])


def corpus(n=320, length=12):
    g = torch.Generator().manual_seed(77)
    tokens = torch.randint(0, 40, (n, length), generator=g)
    tags = (tokens + tokens.roll(1, dims=1)) % 5
    return tokens, tags


def batches(tokens, tags, epoch, rank, world, size):
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1000 + epoch))
    mine = order[rank::world]
    for i in range(0, len(mine) - size + 1, size):
        idx = mine[i : i + size]
        yield tokens[idx], tags[idx]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = Tagger()
    reducer = AsyncReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_fn = nn.CrossEntropyLoss()
    tokens, tags = corpus()

    for epoch in range(int(os.environ.get("EPOCHS", 4))):
        tally = torch.zeros(3)
        for x, y in batches(tokens, tags, epoch, rank, world, 16):
            logits = model(x)
            loss = loss_fn(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            reducer.synchronize()
            optimizer.step()
            tally += torch.tensor([loss.item(), (logits.argmax(-1) == y).float().mean().item(), 1.0])
        dist.all_reduce(tally)
        if rank == 0:
            print(f"epoch {epoch}  loss {tally[0] / tally[2]:.3f}  acc {tally[1] / tally[2]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
