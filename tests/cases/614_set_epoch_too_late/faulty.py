"""Fine-tuning-like script with callbacks: MLP-mixer on patches."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Callback:
    def on_epoch_begin(self, trainer):
        pass

    def on_epoch_end(self, trainer):
        pass


class Reshuffle(Callback):
    """Gives the sampler a new order for each epoch."""

    def on_epoch_end(self, trainer):
        trainer.loader.sampler.set_epoch(trainer.epoch)


class Progress(Callback):
    def on_epoch_end(self, trainer):
        t = torch.tensor([trainer.loss_sum, float(trainer.batches)])
        dist.all_reduce(t)
        if dist.get_rank() == 0:
            print(f"epoch {trainer.epoch + 1}/{trainer.epochs} loss {t[0] / t[1]:.4f}")


class Mixer(nn.Module):
    def __init__(self, patches=9, dim=16, classes=3):
        super().__init__()
        self.stem = nn.Linear(4, dim)
        self.token = nn.Sequential(nn.LayerNorm(patches), nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channel = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        h = self.stem(x)
        h = h + self.token(h.transpose(1, 2)).transpose(1, 2)
        h = h + self.channel(h)
        return self.head(h.mean(1))


class Trainer:
    def __init__(self, model, loader, epochs, callbacks):
        self.model, self.loader, self.epochs, self.callbacks = model, loader, epochs, callbacks
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def call(self, hook):
        for cb in self.callbacks:
            getattr(cb, hook)(self)

    def fit(self):
        for self.epoch in range(self.epochs):
            self.call("on_epoch_begin")
            self.loss_sum, self.batches = 0.0, 0
            for x, y in self.loader:
                self.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.loss_sum += loss.item()
                self.batches += 1
            self.call("on_epoch_end")


def patches(n=288):
    g = torch.Generator().manual_seed(71)
    y = torch.randint(0, 3, (n,), generator=g)
    x = torch.randn(n, 9, 4, generator=g)
    x[torch.arange(n), y * 3] += 2
    return TensorDataset(x, y)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(int(os.environ.get("SEED", 0)))
    ds = patches()
    loader = DataLoader(ds, batch_size=18, sampler=DistributedSampler(ds, shuffle=True))
    Trainer(DDP(Mixer()), loader, 4, [Reshuffle(), Progress()]).fit()
    dist.destroy_process_group()
