"""Keyword spotting with a Trainer that takes callbacks and continues after a preemption."""
import math
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spoken_words(count=576, words=6, frames=32, bands=16, seed=7):
    gen = torch.Generator().manual_seed(seed)
    label = torch.randint(words, (count,), generator=gen)
    rise = torch.linspace(0, 1, frames)[None] * (label[:, None] - 2.5) * 2.0 + bands / 2
    band = torch.arange(bands)[None, :, None]
    energy = torch.exp(-((band - rise[:, None]) ** 2) / 3.0)
    return TensorDataset(energy + 0.6 * torch.randn(energy.shape, generator=gen), label)


class WordNet(nn.Module):
    def __init__(self, bands=16, words=6):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(bands, 48, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(48, 48, 5, padding=2), nn.ReLU(), nn.AdaptiveMaxPool1d(4), nn.Flatten(), nn.Linear(192, words))

    def forward(self, x):
        return self.net(x)


class Callback:
    def epoch_end(self, trainer, epoch, loss):
        pass


class Report(Callback):
    def epoch_end(self, trainer, epoch, loss):
        if dist.get_rank() == 0:
            rate = trainer.optimizer.param_groups[0]["lr"]
            print(f"epoch {epoch}  loss {loss:.4f}  lr {rate:.2e}", flush=True)


class Checkpoint(Callback):
    def __init__(self, path):
        self.path = path

    def epoch_end(self, trainer, epoch, loss):
        if dist.get_rank() == 0:
            parts = {name: getattr(trainer, name).state_dict() for name in trainer.parts}
            torch.save({"epoch": epoch + 1, "parts": parts}, self.path)
        dist.barrier()


class Preempt(Callback):
    """The queue takes the machine back after this epoch."""

    def __init__(self, after):
        self.after = after

    def epoch_end(self, trainer, epoch, loss):
        trainer.stop = epoch + 1 >= self.after


class Trainer:
    parts = ("model", "optimizer", "schedule")

    def __init__(self, model, callbacks, epochs=6, lr=3e-3, resume=None):
        self.model = model
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=lr)
        self.schedule = None
        self.callbacks, self.epochs, self.resume = callbacks, epochs, resume
        self.first, self.stop = 0, False

    def make_schedule(self, steps_per_epoch):
        total, warm = self.epochs * steps_per_epoch, steps_per_epoch

        def factor(step):
            if step < warm:
                return (step + 1) / warm
            return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))

        return LambdaLR(self.optimizer, factor)

    def restore(self):
        if self.resume is None:
            return
        state = torch.load(self.resume, weights_only=True)
        for name, value in state["parts"].items():
            part = getattr(self, name, None)
            if part is not None:
                part.load_state_dict(value)
        self.first = state["epoch"]

    def fit(self, loader):
        self.restore()
        self.schedule = self.make_schedule(len(loader))
        for epoch in range(self.first, self.epochs):
            loader.sampler.set_epoch(epoch)
            total = torch.zeros(2)
            for x, y in loader:
                loss = F.cross_entropy(self.ddp(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.schedule.step()
                total += torch.tensor([loss.item(), 1.0])
            dist.all_reduce(total)
            for callback in self.callbacks:
                callback.epoch_end(self, epoch, (total[0] / total[1]).item())
            if self.stop:
                break


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = spoken_words()
    loader = DataLoader(data, batch_size=24, sampler=DistributedSampler(data, shuffle=True, drop_last=True))
    path = "words.pt"
    Trainer(WordNet(), [Report(), Checkpoint(path), Preempt(after=3)]).fit(loader)
    if dist.get_rank() == 0:
        print("requeued", file=sys.stdout, flush=True)
    Trainer(WordNet(), [Report(), Checkpoint(path)], resume=path).fit(loader)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
