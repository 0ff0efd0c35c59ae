"""What is summed at the root of a loss: samples, or the terms of several tasks."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda a, b, n: a / n, (12.0, (1.0,))),
        (lambda a, b, n: a / n + b / n, (12.0, (1.0, 1.0))),
        (lambda a, b, n: 2.0 * (a / n) + b / n * torch.tensor(0.5), (12.0, (2.0, 0.5))),
        (lambda a, b, n: sum([a / n, 3 * (b / n)]), (12.0, (1.0, 3.0))),
        (lambda a, b, n: a / n + b, None),  # a part of it
        (lambda a, b, n: a / n + b / 7, None),
        (lambda a, b, n: 2.0 * (a / n), None),  # a factor over all of it
        (lambda a, b, n: torch.add(a / n, b / n, alpha=0.5), None),
        (lambda a, b, n: a / (b.detach() * 0 + 0.5), None),  # no count
        (lambda a, b, n: sum(a / n for _ in range(40)), None),  # more terms than are read
        (lambda a, b, n: a / b, None),  # by a part of the graph
        (lambda a, b, n: (a / n + 1) * (b / n), None),
    ],
)
def test_the_count_that_every_term_is_divided_by(make: Any, told: Any) -> None:
    weight = torch.ones(3, requires_grad=True)
    a, b = (weight * 2).sum(), (weight * 4).sum()
    assert roots.divisor_of(make(a, b, torch.tensor(5.0).clamp(min=12))) == told
