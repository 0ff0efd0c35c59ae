"""Keyword spotting on synthetic audio with gradient accumulation."""
import argparse
import math
import os
from contextlib import nullcontext
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainConfig:
    epochs: int = 5
    micro_batch: int = 12
    accumulate: int = 4
    lr: float = 6e-3
    max_norm: float = 1.0
    seed: int = 4
    ema: float = 0.9
    output: str = "keywords"

    @classmethod
    def from_cli(cls):
        parser = argparse.ArgumentParser()
        for f in fields(cls):
            parser.add_argument("--" + f.name.replace("_", "-"), type=type(f.default), default=f.default)
        return cls(**vars(parser.parse_args()))


class ToneWords(Dataset):
    """A 'word' is a sequence of three tones out of four."""

    WORDS = [(0, 1, 2), (2, 1, 0), (0, 2, 3), (3, 0, 1), (1, 3, 1), (2, 0, 2)]

    def __init__(self, size, seed, samples=240):
        self.size, self.seed, self.samples = size, seed, samples

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 65537 + i)
        label = int(torch.randint(0, len(self.WORDS), (1,), generator=g))
        t = torch.arange(self.samples // 3) / 40.0
        parts = []
        for tone in self.WORDS[label]:
            phase = 6.28 * torch.rand(1, generator=g)
            parts.append((6.28 * (1.5 + 2.0 * tone) * t + phase).sin())
        wave = torch.cat(parts) + 0.5 * torch.randn(len(parts) * len(t), generator=g)
        return wave, label


class Spectrogram(nn.Module):
    def __init__(self, n_fft=40, hop=10):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, wave):
        spec = torch.stft(wave, self.n_fft, self.hop, window=self.window, return_complex=True).abs()
        return torch.log1p(spec)


class SeparableConv(nn.Module):
    def __init__(self, c, stride=1):
        super().__init__()
        self.depth = nn.Conv1d(c, c, 5, stride=stride, padding=2, groups=c)
        self.point = nn.Conv1d(c, c, 1)
        self.norm = nn.GroupNorm(4, c)

    def forward(self, x):
        return F.relu(self.norm(self.point(self.depth(x))))


class KeywordNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.spectrogram = Spectrogram()
        self.inp = nn.Conv1d(21, width, 1)
        self.blocks = nn.Sequential(SeparableConv(width), SeparableConv(width, 2), SeparableConv(width))
        self.out = nn.Linear(width * 3, len(ToneWords.WORDS))

    def forward(self, wave):
        h = self.blocks(self.inp(self.spectrogram(wave)))
        return self.out(F.adaptive_avg_pool1d(h, 3).flatten(1))


class SmoothedValue:
    def __init__(self, beta):
        self.beta, self.value = beta, None

    def update(self, v):
        self.value = v if self.value is None else self.beta * self.value + (1 - self.beta) * v
        return self.value


class AccumulatingTrainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        train, self.test = ToneWords(504, 1), ToneWords(120, 2)
        self.sampler = DistributedSampler(train, shuffle=True, seed=cfg.seed)
        self.loader = DataLoader(train, cfg.micro_batch, sampler=self.sampler, drop_last=True)
        torch.manual_seed(cfg.seed)
        self.model = DDP(KeywordNet())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        self.updates_per_epoch = math.ceil(len(self.loader) / cfg.accumulate)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=cfg.lr, total_steps=cfg.epochs * self.updates_per_epoch)
        self.smooth = SmoothedValue(cfg.ema)
        self.updates = 0

    def window_size(self, i):
        """Number of micro batches in the window that micro batch i belongs to."""
        first = i - i % self.cfg.accumulate
        return min(self.cfg.accumulate, len(self.loader) - first)

    def window_ends(self, i):
        return (i + 1) % self.cfg.accumulate == 0 or i + 1 == len(self.loader)

    def backward(self, i, wave, label):
        context = nullcontext() if self.window_ends(i) else self.model.no_sync()
        with context:
            loss = F.cross_entropy(self.model(wave), label)
            (loss / self.window_size(i)).backward()
        return loss.item()

    def update(self):
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return norm.item()

    def train_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        self.optimizer.zero_grad(set_to_none=True)
        total, norm = 0.0, 0.0
        for i, (wave, label) in enumerate(self.loader):
            total += self.backward(i, wave, label)
            if self.window_ends(i):
                norm = self.update()
        mean = torch.tensor([total / len(self.loader)], dtype=torch.float64)
        dist.all_reduce(mean)
        return mean.item() / self.world, norm

    @torch.no_grad()
    def evaluate(self):
        net = self.model.module.eval()
        right = seen = 0
        for i in range(self.rank, len(self.test), self.world):
            wave, label = self.test[i]
            right += int(net(wave[None]).argmax(1).item() == label)
            seen += 1
        counts = torch.tensor([right, seen])
        dist.all_reduce(counts)
        return counts[0].item() / counts[1].item()

    def fit(self):
        for epoch in range(self.cfg.epochs):
            loss, norm = self.train_epoch(epoch)
            accuracy = self.evaluate()
            if self.rank == 0:
                print(f"epoch {epoch}: loss {loss:.4f} (smooth {self.smooth.update(loss):.4f}) norm {norm:.2f} "
                      f"test {accuracy:.3f} after {self.updates} updates", flush=True)
        if self.rank == 0:
            os.makedirs(self.cfg.output, exist_ok=True)
            torch.save(self.model.module.state_dict(), os.path.join(self.cfg.output, "net.pt"))
        dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    AccumulatingTrainer(TrainConfig.from_cli()).fit()
    dist.destroy_process_group()
