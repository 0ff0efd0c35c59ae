"""What is noted of a checkpoint: its numbers, those of a progress entry too, and not the options that are kept beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.probe.sensors import saving

OPTIMIZER = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
SCHEDULER = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 3)


@pytest.mark.parametrize(
    ("checkpoint", "numbers"),
    [
        ({"model": {}, "epoch": 3, "best": 0.5}, {"epoch": 3, "best": 0.5}),
        ({"model": {}, "progress": {"epoch": 3, "global_step": 40}}, {"epoch": 3, "global_step": 40}),
        ({"epoch": 3, "meta": {"epoch": 9, "best_acc": 0.7}}, {"epoch": 3, "best_acc": 0.7}),
        ({"epoch": 3, "args": {"epochs": 20, "seed": 1, "log_step": 5, "steps_per_epoch": 9, "max_step": 7}}, {"epoch": 3}),
        ({"optimizer": OPTIMIZER.state_dict(), "scheduler": SCHEDULER.state_dict()}, {}),
    ],
)
def test_numbers(checkpoint: dict[str, Any], numbers: dict[str, Any]) -> None:
    assert saving.shape_of(checkpoint)["numbers"] == numbers
