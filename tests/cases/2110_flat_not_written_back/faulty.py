"""Keyword spotting on log-mel frames kept in a memory-mapped file; gradients travel as one flat tensor."""
import dataclasses
import json
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


@dataclasses.dataclass
class Config:
    keywords: int = 8
    mels: int = 20
    frames: int = 50
    clips: int = 640
    batch: int = 20
    epochs: int = 4
    lr: float = 0.05
    seed: int = 6


def write_corpus(cfg, prefix):
    rng = np.random.default_rng(cfg.seed)
    shapes = rng.standard_normal((cfg.keywords, cfg.mels, 12)).astype("float32")
    labels = rng.integers(0, cfg.keywords, cfg.clips)
    mels = np.memmap(prefix + ".f32", dtype="float32", mode="w+", shape=(cfg.clips, cfg.mels, cfg.frames))
    for i, k in enumerate(labels):
        mels[i] = 0.9 * rng.standard_normal((cfg.mels, cfg.frames))
        at = rng.integers(0, cfg.frames - 12)
        mels[i, :, at : at + 12] += shapes[k]
    mels.flush()
    np.save(prefix + ".npy", labels)


class Corpus:
    def __init__(self, cfg, prefix):
        self.cfg = cfg
        self.mels = np.memmap(prefix + ".f32", dtype="float32", mode="r", shape=(cfg.clips, cfg.mels, cfg.frames))
        self.labels = torch.from_numpy(np.load(prefix + ".npy"))

    def batches(self, epoch, rank, world):
        order = np.random.default_rng(1000 + epoch).permutation(self.cfg.clips)
        step = self.cfg.batch * world
        for start in range(0, self.cfg.clips - step + 1, step):
            mine = np.sort(order[start + rank : start + step : world])
            yield torch.from_numpy(self.mels[mine].copy()), self.labels[torch.from_numpy(mine)]


class Spotter(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(cfg.mels, 32, 9, padding=4), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(32, 32, 5, padding=2), nn.GroupNorm(4, 32), nn.ReLU(),
        )
        self.out = nn.Linear(32, cfg.keywords)

    def forward(self, mel):
        return self.out(self.conv(mel).amax(-1))


class GradientBus:
    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.world = dist.get_world_size()

    def broadcast(self):
        for p in self.params:
            dist.broadcast(p.data, src=0)

    def sync(self):
        grads = [p.grad for p in self.params]
        flat = _flatten_dense_tensors(grads)
        dist.all_reduce(flat)
        flat.div_(self.world)
        for grad, synced in zip(grads, _unflatten_dense_tensors(flat, grads)):
            grad = synced


def train(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    prefix = "keywords"
    if rank == 0:
        write_corpus(cfg, prefix)
    dist.barrier()
    corpus = Corpus(cfg, prefix)
    torch.manual_seed(cfg.seed)
    model = Spotter(cfg)
    bus = GradientBus(model)
    bus.broadcast()
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()
    records = []
    for epoch in range(cfg.epochs):
        began, sums = time.perf_counter(), torch.zeros(3)
        for mel, label in corpus.batches(epoch, rank, world):
            optimizer.zero_grad()
            logits = model(mel)
            loss = criterion(logits, label)
            loss.backward()
            bus.sync()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(label), (logits.argmax(1) == label).sum().item(), len(label)])
        dist.all_reduce(sums)
        if rank == 0:
            records.append({"epoch": epoch, "loss": sums[0].item() / sums[2].item(), "acc": sums[1].item() / sums[2].item()})
            print(json.dumps(records[-1]), f"{time.perf_counter() - began:.2f}s", flush=True)
    if rank == 0:
        with open("history.json", "w") as f:
            json.dump(records, f)
        torch.save(model.state_dict(), "spotter.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Config())
    dist.barrier()
    dist.destroy_process_group()
