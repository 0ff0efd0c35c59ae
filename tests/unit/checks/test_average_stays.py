"""Averages that stay in the model behind evaluations: a warning where a copy of the trained weights lies there for nothing, else advice."""

from __future__ import annotations

from typing import Any

import pytest
from builder import event, findings, recording, row, run, site

from harness.checks.opt.average_stays import AverageStaysIn
from harness.model import Severity

GOOD: dict[str, Any] = {"evaluated": True, "stays": True, "returned": False, "same": True, "follows": 2, "kept": "stash", "used": False}


def told(*changed: dict[str, Any], line: int = 40) -> list[Any]:
    events = [{}, {}, {}, *changed] if len(changed) < 3 else changed
    return [
        event("swapped_in", s=10 * i, line=line, callers=[], within=site(80), **(GOOD | {"same": i > 0} | fields)) for i, fields in enumerate(events)
    ]  # fmt: skip


def of(*ranks: list[Any]) -> list[Any]:
    return findings(AverageStaysIn, run([recording(events, [row(0)], rank=r) for r, events in enumerate(ranks)]))


def test_told_at_the_evaluation() -> None:
    found = of(told(), told())
    assert [(f.severity, f.where and f.where.line, f.ranks) for f in found] == [(Severity.WARNING, 80, (0, 1))]
    assert "never put back" in found[0].message and "`stash`" in found[0].help
    assert "written at train.py:40" in found[0].notes[1]


@pytest.mark.parametrize("fields", [{"kept": None}, {"used": True}])
def test_advice_where_it_may_be_meant(fields: dict[str, Any]) -> None:
    found = of(told(fields), told())
    assert [f.severity for f in found] == [Severity.ADVICE] and "on purpose" in found[0].help


@pytest.mark.parametrize("fields", [{"evaluated": False, "stays": False}, {"stays": False}, {"returned": True}, {"same": False}])
def test_one_that_was_put_back_or_only_trained_on_clears_all(fields: dict[str, Any]) -> None:
    assert of(told(fields), told(fields)) == []


def test_weights_that_move_only_when_they_are_put_in_are_no_average() -> None:
    still = told(*({"follows": 0} for _ in range(4)))
    assert of(still, still) == []


def test_one_rank_alone_is_for_another_check_and_one_time_is_a_choice() -> None:
    assert of(told(), []) == []
    assert of(told()[:1], told()[:1]) == []


def test_weights_that_are_put_back_out_of_themselves_are_for_another_check() -> None:
    events = [*told(), event("self_copy", line=50, num=4, moved=True)]
    assert of(events, events) == []
