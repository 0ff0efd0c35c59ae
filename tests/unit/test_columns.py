"""Rows read by column are the rows decoded one by one, and aligned steps are those put together rank by rank."""

from __future__ import annotations

import math
import statistics

import pytest

from harness import columns
from harness.checks.prf import pace
from harness.model import Plan, Scenario
from harness.probe import protocol
from harness.record import Recording, Run, parse_events
from harness.steps import AlignedStep

VALUES = {"I": 4_000_000_000, "H": 65_535, "Q": (1 << 64) - 3, "q": -5, "i": -7, "d": math.pi, "f": 0.25}


def row(step: int, **more: int | float) -> bytes:
    fields: dict[str, int | float] = {name: (1 << 63) + i for i, name in enumerate(protocol.DIGESTS)}
    for name, (_, fmt) in protocol.NUMBER_OFFSET.items():
        fields[name] = VALUES[fmt.format.lstrip("<")]
    fields |= {"step": step} | more
    return protocol.ROW.pack(*(fields[name] for name in protocol.ROW_FIELDS))


def run_of(*recordings: list[bytes] | None) -> Run:
    ranks = [None if rows is None else Recording(f"0-{i}-1", rows=b"".join(rows)) for i, rows in enumerate(recordings)]
    return Run(Plan("x", Scenario("x", "x.py"), (), len(ranks)), ranks, [r for r in ranks if r is not None])


@pytest.mark.parametrize("name", list(protocol.NUMBER_OFFSET))
def test_a_column_holds_what_the_rows_hold(name: str) -> None:
    recording = Recording("0-1-1", rows=row(3) + row(9) + b"torn")
    assert recording.column(name).tolist() == [getattr(r, name) for r in recording.all_rows()]


def test_a_digest_is_compared_over_all_ranks() -> None:
    run = run_of([row(0), row(1), row(2)], [row(0), row(1, grad=7), row(2)], [row(0), row(1), row(2, param=1)])
    steps = list(run.steps())
    assert all(isinstance(s, AlignedStep) for s in steps)
    assert [s.same("grad") for s in steps] == [True, False, True]
    assert [s.same("param") for s in steps] == [True, True, False]
    assert [s.same("full") for s in steps] == [True, True, True]
    assert steps[1].rows[1].grad == 7  # type: ignore[union-attr]


def test_ranks_that_stopped_are_none_in_the_steps_after() -> None:
    run = run_of([row(0), row(1, num_coll=5), row(2)], [row(0), row(1)])
    steps = list(run.steps())
    assert [s.index for s in steps] == [0, 1, 2]
    assert [s.complete for s in steps] == [True, True, False]
    assert steps[1].number("num_coll") == [5, VALUES["I"]]
    assert [raw is None for raw in steps[2].raw] == [False, True]


def test_ranks_whose_steps_differ_are_put_together_by_number() -> None:
    steps = list(run_of([row(0), row(2)], [row(0), row(1), row(2)]).steps())
    assert [s.index for s in steps] == [0, 1, 2]
    assert [s.complete for s in steps] == [True, False, True]
    assert not steps[1].raw[0] and steps[1].raw[1]


def test_a_rank_that_never_reported_makes_no_step_complete() -> None:
    steps = list(run_of([row(0)], None).steps())
    assert len(steps) == 1 and not steps[0].complete and steps[0].number("step") == [0]


def test_no_rank_no_step() -> None:
    assert list(run_of(None, None).steps()) == []
    assert columns.numbers(b"", "step").tolist() == []


@pytest.mark.parametrize("values", [[1.0], [3.0, 1.0], [2.0, 2.0, 5.0], [4.0, 1.0, 3.0, 2.0], [1.0, 1.0, 1.0, 9.0, 2.0]])
def test_the_median_of_the_others(values: list[float]) -> None:
    for i, value in enumerate(values):
        others = values[:i] + values[i + 1 :]
        assert pace.median_without(value, sorted(values)) == (statistics.median(others) if others else 0.0)


def test_equal_sites_are_one_object_and_a_forged_one_is_left_as_it_is() -> None:
    site = '{"file":"a.py","line":1,"func":"f","text":"x"}'
    lines = [f'{{"k":"a","t":1,"site":{s}}}' for s in (site, site, '{"file":["a.py"]}', "null")]
    events = list(parse_events("\n".join([*lines, '{"k":"a","t":2,"x":NaN}']).encode()))
    assert len(events) == 5 and events[0]["site"] is events[1]["site"]
    assert events[2]["site"] == {"file": ["a.py"]} and events[3].where is None
    assert math.isnan(events[4]["x"])
