"""Product classification from a text and, where there is one, a picture."""
from __future__ import annotations

import os
from typing import Iterator, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Batch(NamedTuple):
    text: Tensor
    picture: Tensor
    has_picture: Tensor
    label: Tensor


class Shop:
    """a share `p` of the products has a picture; the feeds of the ranks are different shops"""

    def __init__(self, seed: int, p: float):
        self.gen, self.p = torch.Generator().manual_seed(seed), p

    def __iter__(self) -> Iterator[Batch]:
        while True:
            label = torch.randint(0, 4, (6,), generator=self.gen)
            text = torch.randn(6, 20, generator=self.gen)
            text[:, :4] += nn.functional.one_hot(label, 4) * 1.2
            picture = torch.randn(6, 1, 8, 8, generator=self.gen) + label.view(-1, 1, 1, 1) * 0.3
            yield Batch(text, picture, torch.rand(6, generator=self.gen) < self.p, label)


class TwoTowers(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.text = nn.Sequential(nn.Linear(20, width), nn.GELU())
        self.vision = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, width))
        self.classify = nn.Linear(width, 4)

    def forward(self, batch: Batch) -> Tensor:
        h = self.text(batch.text)
        where = batch.has_picture.nonzero().squeeze(1)
        if len(where):
            h = h.index_add(0, where, self.vision(batch.picture[where]))
        return self.classify(h)


def train(steps: int = 60) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(21)
    model = DDP(TwoTowers(), find_unused_parameters=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    right = torch.zeros(1)
    feed = iter(Shop(seed=40 + rank, p=0.95 if rank == 0 else 0.25))
    for step in range(1, steps + 1):
        batch = next(feed)
        logits = model(batch)
        loss = nn.functional.cross_entropy(logits, batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += (logits.argmax(1) == batch.label).float().mean()
        if step % 20 == 0:
            dist.all_reduce(right)
            if rank == 0:
                print(f"step {step}: accuracy {right.item() / 20 / dist.get_world_size():.3f}")
            right.zero_()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        train()
    finally:
        dist.destroy_process_group()
