"""Keyword spotting on synthetic spectrograms. Gradients are reduced while backward is still running."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass
class Config:
    keywords: int = 6
    mels: int = 20
    frames: int = 30
    clips: int = 480
    batch: int = 12
    epochs: int = 4
    lr: float = 0.05
    seed: int = 11


class GradientReducer:
    """Starts an all-reduce for each gradient as soon as autograd has accumulated it."""

    def __init__(self, module):
        self.world = dist.get_world_size()
        self.pending = []
        for t in list(module.parameters()) + list(module.buffers()):
            dist.broadcast(t.data, src=0)
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self._launch)

    def _launch(self, p):
        p.grad.div_(self.world)
        self.pending.append(dist.all_reduce(p.grad, async_op=True))

    def finish(self):
        for work in self.pending:
            work.wait()
        self.pending.clear()


class Spotter(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(cfg.mels, 64, 5, padding=2), nn.ReLU(), nn.Conv1d(64, 64, 5, stride=2, padding=2), nn.ReLU()
        )
        self.rnn = nn.GRU(64, 96, batch_first=True)
        self.out = nn.Linear(96, cfg.keywords)

    def forward(self, spec):
        h = self.conv(spec).transpose(1, 2)
        _, last = self.rnn(h)
        return self.out(last[0])


def make_clips(cfg):
    g = torch.Generator().manual_seed(100)
    word = torch.randint(0, cfg.keywords, (cfg.clips,), generator=g)
    pattern = torch.randn(cfg.keywords, cfg.mels, cfg.frames, generator=g)
    gain = 0.5 + torch.rand(cfg.clips, 1, 1, generator=g)
    return gain * pattern[word] + 1.2 * torch.randn(cfg.clips, cfg.mels, cfg.frames, generator=g), word


def epoch_batches(cfg, epoch, rank, world):
    order = torch.randperm(cfg.clips, generator=torch.Generator().manual_seed(1000 * cfg.seed + epoch))
    mine = order[: cfg.clips // world * world][rank::world]
    for chunk in mine.split(cfg.batch):
        if len(chunk) == cfg.batch:
            yield chunk


def run(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    net = Spotter(cfg)
    reducer = GradientReducer(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=cfg.lr, momentum=0.9)
    specs, words = make_clips(cfg)

    for epoch in range(cfg.epochs):
        total = torch.zeros(3)
        for index in epoch_batches(cfg, epoch, rank, world):
            optimizer.zero_grad()
            logits = net(specs[index])
            loss = nn.functional.cross_entropy(logits, words[index])
            loss.backward()
            optimizer.step()
            reducer.finish()
            hits = (logits.argmax(1) == words[index]).sum().item()
            total += torch.tensor([loss.item() * len(index), hits, len(index)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"[{epoch}] loss={total[0] / total[2]:.4f} acc={total[1] / total[2]:.3f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    try:
        run(Config())
        dist.barrier()
    finally:
        dist.destroy_process_group()
