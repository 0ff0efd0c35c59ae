import os
from collections import namedtuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

Loaders = namedtuple("Loaders", "train val")


def build_dataloaders(batch_size):
    g = torch.Generator().manual_seed(21)
    def make(n):
        x = torch.randn(n, 4, 6, generator=g)
        return TensorDataset(x, (x.amax(2) > 1.2).float())
    train, val = make(288), make(64)
    return Loaders(
        train=DataLoader(train, batch_size, sampler=DistributedSampler(train, shuffle=True)),
        val=DataLoader(val, batch_size, sampler=DistributedSampler(val, shuffle=False)),
    )


class MultiLabel(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
        self.inp = nn.Linear(6, d)
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        h = self.inp(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.out(torch.relu(h)).squeeze(-1)


class Engine:
    def __init__(self, epochs=4, batch_size=12):
        self.rank = int(os.environ["RANK"])
        torch.manual_seed(0)
        self.loaders = build_dataloaders(batch_size)
        self.model = DistributedDataParallel(MultiLabel())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        self.criterion = nn.BCEWithLogitsLoss()
        self.epochs = epochs

    def before_epoch(self, epoch):
        self.loaders.train.sampler.set_epoch(epoch)

    def train(self):
        self.model.train()
        for x, y in self.loaders.train:
            self.optimizer.zero_grad()
            self.criterion(self.model(x), y).backward()
            self.optimizer.step()

    @torch.inference_mode()
    def evaluate(self):
        self.model.eval()
        c = torch.zeros(2)
        for x, y in self.loaders.val:
            c += torch.tensor([((self.model(x) > 0) == (y > 0.5)).sum().item(), y.numel()])
        dist.all_reduce(c)
        return (c[0] / c[1]).item()

    def run(self):
        for epoch in range(self.epochs):
            self.before_epoch(epoch)
            self.train()
            score = self.evaluate()
            if self.rank == 0:
                print(f"[{epoch + 1}/{self.epochs}] val label accuracy {score:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Engine().run()
    dist.destroy_process_group()
