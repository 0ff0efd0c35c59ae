"""The quotient of a loss's graph that stands for the number of ranks or the batch of all ranks, and the factors that make up for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from harness.probe.sensors import twicedivided  # noqa: E402
from harness.probe.state import S  # noqa: E402

ROWS = 8


def divisor(make: Callable[[Any], Any], kind: str, monkeypatch: pytest.MonkeyPatch, ranks: int = 3) -> float:
    monkeypatch.setattr(S, "batch_rows", ROWS)
    out = torch.nn.Linear(4, 1)(torch.randn(ROWS, 4))
    return twicedivided._divisor(make(out), kind, ranks)


@pytest.mark.parametrize(
    ("make", "kind", "value"),
    [
        (lambda out: out.pow(2).mean() / 3, "ranks", 3.0),
        (lambda out: (out.pow(2).mean() + 0.1 * out.abs().sum()) / 3, "ranks", 3.0),
        (lambda out: out.pow(2).mean() / 3 / 4, "ranks", 3.0),  # and by micro-batches
        (lambda out: out.pow(2).sum() / ROWS / 3, "ranks", 3.0),
        (lambda out: out.pow(2).sum() / 24, "batch", 24.0),
        (lambda out: 2.0 * out.pow(2).sum() / 24 + out.abs().sum() / 24, "batch", 24.0),
        (lambda out: out.pow(2).mean(), "ranks", 0.0),
        (lambda out: 3 * (out.pow(2).mean() / 3), "ranks", 0.0),  # made up for
        (lambda out: (3 * out.pow(2).mean()) / 3, "ranks", 0.0),
        (lambda out: out.pow(2).sum() / 3, "ranks", 0.0),  # no mean to begin with
        (lambda out: out.pow(2).sum() / ROWS, "batch", 0.0),
        (lambda out: out.pow(2).sum() * 3 / 24, "batch", 0.0),
        (lambda out: out.pow(2).mean() / 24, "batch", 0.0),
    ],
)
def test_quotients(make: Callable[[Any], Any], kind: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert divisor(make, kind, monkeypatch) == value
