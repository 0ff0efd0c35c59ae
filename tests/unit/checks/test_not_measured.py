"""What is averaged behind an evaluation and is none of its measurements: a training loss, a number that is logged every few steps."""

from __future__ import annotations

import pytest
from test_evl import losses, measured, reduced, said, says, silent, trained, two

from harness.checks.evl.unequal_means import MeanOfUnequalMeans
from harness.record import Event, Run


def averaged(values: tuple[float, float], *, rows: tuple[list[float], list[float]] = ([9, 9], [8, 8]), ways: tuple[int, int] = (7, 8)) -> Run:
    """A training pass, after which the statement that reduces was reached by the first way; an evaluation of unequal shares, then the second way."""
    own: list[list[Event]] = []
    for rank in range(2):
        events = [reduced([0.91 + rank], [2.82], s=1), *trained(0, 2), *measured(1, 2, rank=rank, num_samples=(12, 8)[rank])]
        events.append(reduced([values[rank]], [sum(values)], s=2))
        for one, way in zip((events[0], events[-1]), ways, strict=True):
            one.data["way"] = way  # type: ignore[index]
        own.append(events + ([says(f"loss {sum(values) / 2:.4f}", s=2, y=6)] if rank == 0 else []))
    return two(*own, rows=(losses(*rows[0]), losses(*rows[1])))


def test_a_number_of_the_evaluation() -> None:
    said(MeanOfUnequalMeans, averaged((0.42, 0.50)))
    said(MeanOfUnequalMeans, averaged((0.42, 0.50), ways=(0, 0)))  # nobody knows how it was reached


def test_the_same_calls_reduce_where_nothing_was_measured() -> None:
    silent(MeanOfUnequalMeans, averaged((0.42, 0.50), ways=(7, 7)))


def phases(*firsts: int) -> Run:
    """One statement, reached by one way: in training (at the steps `firsts`), then behind an evaluation of unequal shares at step 2."""
    own: list[list[Event]] = []
    for rank in range(2):
        events = [*trained(0, 2), *(reduced([0.31 + rank], [1.62], s=s) for s in firsts), *measured(1, 2, rank=rank, num_samples=(12, 8)[rank])]
        events.append(reduced([(0.42, 0.50)[rank]], [0.92], s=2))
        for one in events:
            if one.kind == "reduced":
                one.data["way"] = 7  # type: ignore[index]
        own.append(events + ([says("val accuracy 0.4600", s=2, y=6)] if rank == 0 else []))
    return two(*own, rows=(losses(9, 9), losses(8, 8)))


def test_a_loop_over_phases_reduces_what_each_counted() -> None:
    said(MeanOfUnequalMeans, phases(2))
    said(MeanOfUnequalMeans, phases(1, 2))  # an evaluation every second time
    silent(MeanOfUnequalMeans, phases(1))  # a number that is logged every step
    silent(MeanOfUnequalMeans, phases(1, 1, 2))  # two of them, with the evaluation between


@pytest.mark.parametrize(
    ("rows", "fires"),
    [
        (([0.9, 0.42], [0.9, 0.50]), False),  # the last loss
        (([0.40, 0.44], [0.46, 0.54]), False),  # the mean of the last two
        (([0.2, 0.22], [0.3, 0.20]), False),  # their sum
        (([0.9, 0.42], [0.9, 0.49]), True),  # one rank's alone is chance
        (([0.42, 0.9], [0.50, 0.9]), True),  # of a step before, which nobody would log now
    ],
)
def test_training_losses(rows: tuple[list[float], list[float]], fires: bool) -> None:
    (said if fires else silent)(MeanOfUnequalMeans, averaged((0.42, 0.50), rows=rows))
