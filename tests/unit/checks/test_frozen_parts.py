"""SYN115 on frozen parameters inside a wrapped model: which partings are told, and how surely."""

from __future__ import annotations

from typing import Any

import pytest

from harness.model import Severity
from harness.record import Event
from tests.unit.checks.builder import event, findings
from tests.unit.checks.test_syn_sync import CHECKS, two_ranks

Told = list[tuple[int, int, list[str]]]  # step, digest (of each too), moved
BEGAN: Told = [(0, 5, [])]


def state(told: Told, used: bool) -> list[Event]:
    events = [event("frozen_state", line=27 if moved else None, s=s, index=0, digest=d, num=7, moved=dict.fromkeys(moved, d)) for s, d, moved in told]
    return [*events, *([event("frozen_used", s=told[-1][0] + 1, index=0, names=["w"])] if used else [])]


def severities(ranks: tuple[Told, Told], used: tuple[bool, bool] = (True, True), **wrap: Any) -> list[Severity]:
    def extra(r: int) -> list[Event]:
        return [event("wrap", line=12, index=0, names=["w"], group_size=2, **wrap), *state(ranks[r], used[r])]

    found = findings(CHECKS["SYN115"], two_ranks(extra=extra))
    assert all(f.where is not None and f.where.line == 27 for f in found)
    return [f.severity for f in found]


def test_one_rank_writes() -> None:
    assert severities(([*BEGAN, (32, 6, ["w"]), (48, 7, ["w"])], BEGAN), (True, False)) == [Severity.WARNING]


def test_every_rank_writes_its_own() -> None:
    assert severities(([*BEGAN, (32, 6, ["w"])], [*BEGAN, (32, 8, ["w"])])) == [Severity.ADVICE]


@pytest.mark.parametrize(
    ("ranks", "used"),
    [
        (([*BEGAN, (32, 6, [])], BEGAN), (True, True)),  # by rounding
        (([*BEGAN, (32, 6, ["w"])], BEGAN), (False, True)),  # an average that the rank keeps inside the model
        (([*BEGAN, (32, 6, ["w"])], [*BEGAN, (32, 6, ["w"])]), (True, True)),  # alike
        (([*BEGAN, (32, 6, ["average"])], BEGAN), (True, True)),  # and another is called
        (([(0, 4, []), (32, 6, ["w"])], BEGAN), (True, True)),  # personal from the start
        (([*BEGAN, (32, 6, ["w"]), (48, 5, [])], BEGAN), (True, True)),  # taken back
        (([*BEGAN, (32, 6, ["w"]), (48, 9, ["w"]), (64, 7, ["w"])], [*BEGAN, (48, 9, ["w"])]), (True, True)),  # sent in between
    ],
)
def test_healthy(ranks: tuple[Told, Told], used: tuple[bool, bool]) -> None:
    assert severities(ranks, used) == []
