"""What is gathered is told as classes, one a sample, or as scores, of which the best column is one."""

from __future__ import annotations

import pytest
import torch

from harness.probe import datasets
from harness.probe.sensors import metrics


def test_scores_are_told_by_their_best_column() -> None:
    scores = torch.randn(12, 5)
    told = metrics._classes(scores)
    assert told is not None and told["scored"] == datasets.pack(datasets.row_digests(scores.argmax(1))) and "classes" not in told


def test_classes() -> None:
    told = metrics._classes(torch.arange(12))
    assert told is not None and told["classes"] == datasets.pack(datasets.row_digests(torch.arange(12))) and "scored" not in told


@pytest.mark.parametrize(
    "given",
    [torch.randn(12), torch.randn(12, 1), torch.randn(4, 5), torch.randn(12, 5, 2), torch.ones(12, 5, dtype=torch.int64), torch.randn(12, 300), [1, 2]],
)
def test_neither(given: object) -> None:
    assert metrics._classes(given) is None
