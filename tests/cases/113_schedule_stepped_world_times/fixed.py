"""Counting task for a tiny transformer: trainer with hooks, gradients averaged one by one."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class CountEvens(Dataset):
    """How many even digits does the row have?"""

    def __init__(self, n=960, length=8):
        g = torch.Generator().manual_seed(23)
        self.rows = torch.randint(0, 10, (n, length), generator=g)
        self.label = (self.rows % 2 == 0).sum(1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], self.label[i]


class SmallTransformer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.emb = nn.Embedding(10, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 9)

    def forward(self, rows):
        return self.head(self.layer(self.emb(rows)).sum(1))


class WarmupCosine:
    """Callback that owns the learning rate."""

    def __init__(self, opt, warmup, total):
        def factor(step):
            if step < warmup:
                return (step + 1) / (warmup + 1)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (total - warmup))))

        self.sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)

    def after_step(self):
        self.sched.step()


class Trainer:
    def __init__(self, net, data, epochs, batch, lr):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.net = net
        for p in net.parameters():
            dist.broadcast(p.data, src=0)
        self.sampler = DistributedSampler(data, seed=3)
        self.loader = DataLoader(data, batch_size=batch, sampler=self.sampler)
        self.epochs = epochs
        self.opt = torch.optim.Adam(net.parameters(), lr=lr)
        self.callbacks = [WarmupCosine(self.opt, warmup=10, total=epochs * len(self.loader))]

    def sync(self):
        for p in self.net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.world

    def run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for rows, label in self.loader:
            loss = nn.functional.cross_entropy(self.net(rows), label)
            self.opt.zero_grad()
            loss.backward()
            self.sync()
            self.opt.step()
            for cb in self.callbacks:
                cb.after_step()
            sums += torch.tensor([loss.item() * len(label), len(label)])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def fit(self):
        for epoch in range(self.epochs):
            loss = self.run_epoch(epoch)
            if self.rank == 0:
                print(f"epoch {epoch}: loss {loss:.4f}, lr now {self.opt.param_groups[0]['lr']:.2e}")


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    Trainer(SmallTransformer(), CountEvens(), epochs=5, batch=32, lr=5e-3).fit()
    dist.destroy_process_group()
