"""SYN146: what is reduced is zero on every rank, each time."""

from __future__ import annotations

import pytest
from builder import event, findings, recording, row, run

from harness.checks.syn.nothing_reduced import ZerosReduced
from harness.model import Severity
from harness.record import Run


def reduced(*, zero: tuple[bool, bool] = (True, True), steps: tuple[int, ...] = (12, 24, 36), numel: int = 64, op: str = "all_reduce", once: int = -1) -> Run:
    def events(rank: int) -> list[object]:
        return [
            event("coll", s=s, line=71, op=op, numel=numel, **({"zero": True} if zero[rank] and s != once else {})) for s in steps for _ in range(3)
        ]

    return run([recording(events(r), [row(s) for s in range(40)], rank=r) for r in range(2)])  # type: ignore[arg-type]


def test_zeros_are_reduced() -> None:
    (found,) = findings(ZerosReduced, reduced())
    assert (found.code, found.severity, found.where and found.where.line, found.ranks) == ("SYN146", Severity.WARNING, 71, (0, 1))
    assert found.message.startswith("3 tensors that are zero on every rank are reduced here, each of 3 times") and "192 numbers" in found.notes[0]


@pytest.mark.parametrize(
    "healthy",
    [
        reduced(zero=(True, False)),
        reduced(once=24),  # once there was something
        reduced(steps=(12, 24)),
        reduced(steps=(0, 0, 0, 0)),  # before training, or a benchmark
        reduced(numel=1),  # flags
        reduced(op="broadcast"),
    ],
    ids=["one rank", "once", "too few", "before", "flags", "broadcast"],
)
def test_reductions_that_are_healthy(healthy: Run) -> None:
    assert findings(ZerosReduced, healthy) == []
