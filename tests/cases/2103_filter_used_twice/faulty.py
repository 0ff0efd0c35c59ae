"""Character language model (GRU) with frozen character vectors, trained by a small trainer with callbacks."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class CharGRU(nn.Module):
    def __init__(self, vocab, vectors, hidden):
        super().__init__()
        self.emb = nn.Embedding.from_pretrained(vectors, freeze=True)
        self.rnn = nn.GRU(vectors.shape[1], hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.out(h)


def corpus(n_chars, vocab, seed):
    """A second-order Markov text."""
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(0, vocab, (vocab, vocab, 2), generator=g)
    coin = torch.randint(0, 2, (n_chars,), generator=g).tolist()
    text = [0, 1]
    for i in range(n_chars):
        text.append(int(table[text[-2], text[-1], coin[i]]))
    return torch.tensor(text)


class Windows:
    """Yields this rank's share of random windows; the same generator on every rank picks them."""

    def __init__(self, text, length, batch, rank, world, seed):
        self.text, self.length, self.batch, self.rank, self.world, self.seed = text, length, batch, rank, world, seed

    def epoch(self, number, steps):
        g = torch.Generator().manual_seed(self.seed * 1000 + number)
        for _ in range(steps):
            starts = torch.randint(0, len(self.text) - self.length - 1, (self.batch * self.world,), generator=g)
            mine = starts[self.rank :: self.world]
            chunk = torch.stack([self.text[s : s + self.length + 1] for s in mine.tolist()])
            yield chunk[:, :-1], chunk[:, 1:]


class Callback:
    def on_step(self, trainer, loss):
        pass

    def on_epoch(self, trainer, epoch):
        pass


class Perplexity(Callback):
    def __init__(self):
        self.total, self.count = 0.0, 0

    def on_step(self, trainer, loss):
        self.total += loss
        self.count += 1

    def on_epoch(self, trainer, epoch):
        stats = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.all_reduce(stats)
        if trainer.rank == 0:
            mean = (stats[0] / stats[1]).item()
            print(f"epoch {epoch}: loss {mean:.4f} ppl {math.exp(mean):.2f}", flush=True)
        self.total, self.count = 0.0, 0


class SaveLast(Callback):
    def on_epoch(self, trainer, epoch):
        if trainer.rank == 0:
            torch.save(trainer.model.module.state_dict(), "charlm.pt")


class Trainer:
    def __init__(self, model, data, args, callbacks):
        self.rank = dist.get_rank()
        self.model = DDP(model)
        self.data, self.args, self.callbacks = data, args, callbacks
        self.params = filter(lambda p: p.requires_grad, model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=args.lr, momentum=0.9)
        self.criterion = nn.CrossEntropyLoss()

    def train_step(self, ids, targets):
        self.optimizer.zero_grad()
        logits = self.model(ids)
        loss = self.criterion(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.params, self.args.clip)
        self.optimizer.step()
        return loss.item()

    def fit(self):
        for epoch in range(self.args.epochs):
            for ids, targets in self.data.epoch(epoch, self.args.steps):
                loss = self.train_step(ids, targets)
                for cb in self.callbacks:
                    cb.on_step(self, loss)
            for cb in self.callbacks:
                cb.on_epoch(self, epoch)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--vocab", type=int, default=20)
    ap.add_argument("--hidden", type=int, default=64)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--length", type=int, default=32)
    ap.add_argument("--steps", type=int, default=25)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=1.0)
    ap.add_argument("--clip", type=float, default=0.25)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(5)
    vectors = torch.randn(args.vocab, 24)
    model = CharGRU(args.vocab, vectors, args.hidden)
    data = Windows(corpus(6000, args.vocab, 9), args.length, args.batch, dist.get_rank(), dist.get_world_size(), 3)
    Trainer(model, data, args, [Perplexity(), SaveLast()]).fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
