"""Classifier trained by a small trainer with a history callback; gradients are averaged per parameter."""
import json
import os

import torch
import torch.distributed as dist
from torch import nn


def records(n, seed):
    """Two instruments in turn; the second one measures with much more noise."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    centre = 2.2 * torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    noise = torch.tensor([0.5, 2.5]).repeat(n // 2).unsqueeze(1)
    return centre[y] + noise * torch.randn(n, 6, generator=g), y


class Shard:
    """The rank's part of a set in memory, reshuffled as a whole in every epoch."""

    def __init__(self, x, y, batch, rank, world, shuffle):
        self.x, self.y, self.batch, self.rank, self.world, self.shuffle = x, y, batch, rank, world, shuffle

    def batches(self, epoch=0):
        n = len(self.x)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch)) if self.shuffle else torch.arange(n)
        for idx in order[self.rank :: self.world].split(self.batch):
            yield self.x[idx], self.y[idx]


class History:
    """Keeps what the trainer measured; the main process writes it down."""

    def __init__(self, path):
        self.path, self.rows = path, []

    def after_epoch(self, trainer, epoch, train, val):
        dist.all_reduce(train)
        dist.all_reduce(val)
        row = {"epoch": epoch, "train_loss": (train[0] / train[2]).item()}
        row.update(val_loss=(val[0] / val[2]).item(), val_acc=(val[1] / val[2]).item())
        self.rows.append(row)
        if trainer.rank == 0:
            with open(self.path, "w") as f:
                json.dump(self.rows, f, indent=1)
            print(" ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


class Trainer:
    def __init__(self, net, lr, callbacks):
        self.rank, self.world, self.net, self.callbacks = dist.get_rank(), dist.get_world_size(), net, callbacks
        for p in net.parameters():
            dist.broadcast(p.detach(), src=0)
        self.opt = torch.optim.Adam(net.parameters(), lr=lr)

    def run(self, batches, train):
        self.net.train(train)
        totals = torch.zeros(3, dtype=torch.float64)
        for x, y in batches:
            with torch.set_grad_enabled(train):
                out = self.net(x)
                loss = nn.functional.cross_entropy(out, y)
            if train:
                self.opt.zero_grad()
                loss.backward()
                for p in self.net.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= self.world
                self.opt.step()
            totals += torch.tensor([loss.item() * len(y), (out.argmax(1) == y).sum().item(), len(y)])
        return totals

    def fit(self, train_set, val_set, epochs):
        for epoch in range(epochs):
            train = self.run(train_set.batches(epoch), train=True)
            val = self.run(val_set.batches(), train=False)
            for cb in self.callbacks:
                cb.after_epoch(self, epoch, train, val)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 5))
    trainer = Trainer(net, lr=1e-2, callbacks=[History("history.json")])
    train_set = Shard(*records(512, 1), batch=32, rank=rank, world=world, shuffle=True)
    val_set = Shard(*records(200, 2), batch=50, rank=rank, world=world, shuffle=False)
    trainer.fit(train_set, val_set, epochs=6)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
