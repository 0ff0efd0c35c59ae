"""The two models that the probe's cost is measured on, under DDP, and one step of their training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[torch.Tensor], None]


def prepare(name: str, batch: int, pooling: int = 1) -> tuple[Step, torch.Tensor]:
    """A step, and the batch to give it, (batch, 3, 64, 64) for "resnet18..." and (batch, 32) for the tiny one. The process group is there."""
    if name.startswith("resnet18"):
        from torchvision.models import resnet18

        model, x = DistributedDataParallel(nn.Sequential(nn.AvgPool2d(pooling), resnet18(num_classes=10))), torch.randn(batch, 3, 64, 64)
    else:
        model, x = DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))), torch.randn(batch, 32)
    y = torch.randint(0, 10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y[: len(x)]).backward()
        optimizer.step()

    return step, x
