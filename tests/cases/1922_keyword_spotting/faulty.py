"""Keyword spotting on synthetic spectrograms that lie on disk as one file per utterance."""
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    root: Path = Path("utterances")
    n_train: int = 320
    n_test: int = 161
    words: int = 4
    mels: int = 12
    frames: int = 20
    batch: int = 16
    epochs: int = 4
    lr: float = 5e-3


def synthesise(cfg):
    cfg.root.mkdir(exist_ok=True)
    rng = np.random.default_rng(11)
    for i in range(cfg.n_train + cfg.n_test):
        word = int(rng.integers(cfg.words))
        spec = rng.normal(0, 0.6, (cfg.frames, cfg.mels)).astype(np.float32)
        ramp = np.linspace(0, 1, cfg.frames)
        track = {0: ramp, 1: 1 - ramp, 2: np.abs(2 * ramp - 1), 3: np.full_like(ramp, 0.5)}[word]
        spec[np.arange(cfg.frames), (track * (cfg.mels - 1)).astype(int)] += 2.5
        np.savez(cfg.root / f"utt{i:04d}.npz", spec=spec, word=word)


class Spotter(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.rnn = nn.GRU(cfg.mels, 32, batch_first=True)
        self.out = nn.Linear(32, cfg.words)

    def forward(self, x):
        states, _ = self.rnn(x)
        return self.out(states.mean(1))


class Experiment:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if self.rank == 0:
            synthesise(cfg)
        dist.barrier()
        files = sorted(cfg.root.glob("*.npz"))
        self.train_x, self.train_y = self.read(files[: cfg.n_train][self.rank :: self.world])
        self.test_x, self.test_y = self.read(files[cfg.n_train :][self.rank :: self.world])
        torch.manual_seed(3)
        self.net = DDP(Spotter(cfg))
        self.opt = torch.optim.Adam(self.net.parameters(), lr=cfg.lr)

    @staticmethod
    def read(files):
        specs, words = [], []
        for f in files:
            with np.load(f) as z:
                specs.append(torch.from_numpy(z["spec"]))
                words.append(int(z["word"]))
        return torch.stack(specs), torch.tensor(words)

    def fit_epoch(self, epoch):
        self.net.train()
        order = torch.randperm(len(self.train_y), generator=torch.Generator().manual_seed(97 * epoch + self.rank))
        for idx in order.split(self.cfg.batch):
            loss = nn.functional.cross_entropy(self.net(self.train_x[idx]), self.train_y[idx])
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        return loss.item()

    @torch.no_grad()
    def test(self):
        self.net.eval()
        scores = self.net.module(self.test_x).softmax(1)
        table = torch.cat([scores, self.test_y[:, None].float()], dim=1)
        tables = [torch.zeros_like(table) for _ in range(self.world)]
        dist.all_gather(tables, table)
        everything = torch.cat(tables)
        predicted, truth = everything[:, :-1].argmax(1), everything[:, -1].long()
        return (predicted == truth).float().mean().item(), len(truth)


def main():
    dist.init_process_group("gloo")
    cfg = Config()
    exp = Experiment(cfg)
    for epoch in range(cfg.epochs):
        loss = exp.fit_epoch(epoch)
        acc, n = exp.test()
        if exp.rank == 0:
            print(f"[{epoch}] last loss {loss:.3f}, accuracy {acc:.3f} on {n} utterances", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
