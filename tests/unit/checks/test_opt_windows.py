"""OPT138: what a pass leaves over of an accumulation window."""

from __future__ import annotations

import pytest
from builder import event, findings, recording, row, run, site

from harness.checks.opt.window_leaks import WindowCrossesEpochs
from harness.model import Severity
from harness.record import Event, Recording, Run

BACKWARD = site(58, "loss.backward()")


def epochs(batches: int, counts: list[int], *, decided: bool = False, ranks: int = 2) -> Run:
    """Passes of `batches` micro-batches; `counts`: micro-batches of each step of a pass, the same in each, but for its first in the first pass."""

    def rank(r: int) -> Recording:
        told: list[Event] = [event("window_condition", line=55 if decided else None)]
        step = 0
        for loop in range(3):
            told.append(event("loader", line=50, s=step, loop=loop, loader=0))
            for i, n in enumerate(counts):
                first = counts[-1] if i == 0 and loop == 0 else n
                told.append(event("accumulation", line=58, s=step, sites=[[BACKWARD, first]]))
                step += 1
            told.append(event("pass", line=50, s=step, loop=loop, loader=0, grad=True, backwards=batches, num_batches=batches, complete=True))
        return recording(told, [row(s) for s in range(step)], rank=r)

    return run([rank(r) for r in range(ranks)])


def test_what_is_left_over_goes_into_the_next_epoch() -> None:
    (found,) = findings(WindowCrossesEpochs, epochs(26, [6, 4, 4, 4, 4, 4]))
    assert (found.code, found.severity, found.where and found.where.line, found.ranks) == ("OPT138", Severity.WARNING, 58, (0, 1))
    assert "takes 6 micro-batches where the others take 4: 2 are left over" in found.message and "2 epochs" in found.notes[0]
    (found,) = findings(WindowCrossesEpochs, epochs(26, [6, 4, 4, 4, 4, 4], decided=True))
    assert found.where is not None and found.where.line == 55


@pytest.mark.parametrize(
    "healthy",
    [
        epochs(24, [4] * 6),  # nothing is left
        epochs(26, [4] * 6),  # cleared, or counted on across epochs
        epochs(26, [4, 4, 4, 4, 4, 4, 2]),  # a short window of its own
        epochs(26, [6, 4, 6, 4, 4, 4]),  # windows of other lengths anyway
        epochs(26, [5, 4, 4, 4, 4, 4]),  # not what was left
        epochs(26, [1] * 26),
    ],
    ids=["none", "counted", "short", "varied", "other", "no accumulation"],
)
def test_windows_that_are_healthy(healthy: Run) -> None:
    assert findings(WindowCrossesEpochs, healthy) == []


def test_torn_events_are_passed_over() -> None:
    torn = [event("accumulation", s=0, sites=s) for s in (None, [], [3], [[BACKWARD]], [[BACKWARD, "4"]])]
    assert findings(WindowCrossesEpochs, run([recording(torn, [row(0)])])) == []
