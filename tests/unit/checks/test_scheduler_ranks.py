"""A scheduler that is stepped as often as there are ranks, where that is the number of micro-batches too, and where it is meant."""

from __future__ import annotations

import math

import pytest
from builder import event, findings
from replica_runs import two_ranks

from harness.checks.opt.scheduler import SchedulerTooOften
from harness.model import Finding, Severity

STEPS = 40


def stepped(
    *, backwards: tuple[int | None, ...] = (0, 0), micro: int = 2, total: int = 0, kind: str = "LambdaLR", turns: float = 1.0, live: bool = False
) -> list[Finding]:
    """Two scheduler steps an optimizer step, so many backwards before each; a cosine that has gone through `turns` half waves by the end."""
    told = [event("scheduler_made", line=20, id=1, totals=[total] if total else [])]
    told += [event("scheduler", line=46, id=1, opt=0, s=s, kind=kind, backwards=b) for s in range(1, STEPS) for b in backwards]
    rates = [0.05 * (1 + math.cos(math.pi * turns * s / STEPS)) for s in range(STEPS)]
    made = two_ranks(steps=STEPS, each=lambda r, s: {"num_backward": micro, "lr": rates[s]}, extra=lambda r: told, live=live)
    return findings(SchedulerTooOften, made)


@pytest.mark.parametrize("micro", [1, 2])
def test_a_rate_that_climbs_again(micro: int) -> None:
    (found,) = stepped(micro=micro, turns=2)
    assert found.severity is Severity.WARNING and "once for each rank" in found.message and "climbs to 0.0994 again" in found.notes[1]


def test_a_length_for_the_optimizers_steps() -> None:
    (found,) = stepped(total=STEPS, turns=2)
    assert found.severity is Severity.WARNING and "once for each rank" in found.message
    assert [f.severity for f in stepped(total=2 * STEPS)] == [Severity.ADVICE]


def test_a_backward_between_the_two_makes_them_those_of_micro_batches() -> None:
    assert stepped(backwards=(0, 1), turns=2) == []
    assert stepped(backwards=(None, None), turns=2) == []  # a recording that does not say
    (found,) = stepped(backwards=(0, 1), total=STEPS)
    assert "once for each micro-batch" in found.message


@pytest.mark.parametrize(("turns", "severity"), [(1.0, Severity.ADVICE), (2.0, Severity.WARNING), (3.0, Severity.WARNING), (0.5, Severity.WARNING)])
def test_a_function_that_comes_down_with_the_run_counts_the_steps_of_all_ranks(turns: float, severity: Severity) -> None:
    assert [f.severity for f in stepped(turns=turns)] == [severity]
    assert [f.severity for f in stepped(turns=turns, total=2)] == [severity]  # the number of ranks, which the function has bound
    assert stepped(turns=turns, live=True) == []  # how it ends is not seen yet
    assert [f.severity for f in stepped(turns=turns, kind="StepLR", live=True)] == [Severity.WARNING]
