"""Accumulating trainer on top of a base trainer with per-batch hooks."""
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Base:
    def __init__(self, net, loader, lr):
        self.model, self.loader = DDP(net), loader
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def before_batch(self, i):
        self.optimizer.zero_grad()

    def after_backward(self, i):
        self.optimizer.step()

    def context(self, i):
        return contextlib.nullcontext()

    def scale(self):
        return 1.0

    def fit(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            total = torch.zeros(2)
            for i, (x, y) in enumerate(self.loader):
                self.before_batch(i)
                with self.context(i):
                    loss = nn.functional.cross_entropy(self.model(x), y)
                    (loss * self.scale()).backward()
                self.after_backward(i)
                total += torch.tensor([loss.item(), 1.0])
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}")


class Accumulating(Base):
    def __init__(self, *args, every, **kwargs):
        super().__init__(*args, **kwargs)
        self.every = every

    def due(self, i):
        return (i + 1) % self.every == 0

    def context(self, i):
        return contextlib.nullcontext() if self.due(i) else self.model.no_sync()

    def scale(self):
        return 1.0 / self.every

    def before_batch(self, i):
        if i % self.every == 0:
            self.optimizer.zero_grad()

    def after_backward(self, i):
        if self.due(i):
            self.optimizer.step()


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))

    def forward(self, x):
        return self.net(x)


def glyphs(n):
    g = torch.Generator().manual_seed(73)
    y = torch.randint(0, 4, (n,), generator=g)
    return TensorDataset(torch.randn(4, 1, 9, 9, generator=g)[y] + 0.9 * torch.randn(n, 1, 9, 9, generator=g), y)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    data = glyphs(512)
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data), drop_last=True)
    Accumulating(Pixels(), loader, 4e-3, every=4).fit(5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
