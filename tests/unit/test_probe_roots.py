"""What is summed at the root of a loss: samples, or the terms of several tasks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from harness.probe import roots

ROWS = 8
net = torch.nn.Linear(3, 2)
x, y = torch.randn(ROWS, 3), torch.randint(0, 2, (ROWS,))
log_var = torch.nn.Parameter(torch.zeros(2))


def tasks(reduction: str = "mean") -> torch.Tensor:
    out = net(x)
    return torch.stack([F.cross_entropy(out, y, reduction=reduction), F.mse_loss(out, torch.ones_like(out), reduction=reduction)])


@pytest.mark.parametrize(
    ("loss", "of_terms"),
    [
        (tasks().sum(), True),
        ((torch.exp(-log_var) * tasks() + log_var).sum(), True),  # learned weights of the tasks
        (torch.cat([term.view(1) for term in tasks()]).sum(), True),
        (tasks("sum").sum(), False),  # each task is a sum over samples
        (F.cross_entropy(net(x), y, reduction="none").sum(), False),
        (torch.stack([F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]) for i in range(ROWS)]).sum(), False),  # one a sample
        (F.cross_entropy(net(x), y), False),
    ],
)
def test_a_sum_of_terms(loss: torch.Tensor, of_terms: bool) -> None:
    assert roots.of_terms(loss, ROWS) is of_terms


def test_where_the_batch_is_not_known_nothing_is_said_of_the_terms() -> None:
    assert roots.of_terms(tasks().sum(), 0) is False
