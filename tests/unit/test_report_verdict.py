"""The exit code and its precedence: 130/143 > 3 > 4 > 1 > 5 > 0, and never 0 when nothing was checked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from controller_samples import FINDING, OUTCOMES, SUBSTANTIAL, exits

from harness.model import Ending, Finding, Outcome, OutcomeKind, Severity
from harness.report.verdict import exit_code

OK = Ending(exits=exits(0, 0))
CRASHED = (*OUTCOMES, Outcome("SYN101", "x", OutcomeKind.CRASHED))
LAUNCH_ONLY = (Outcome("LAU101", "rank-failed", OutcomeKind.RAN),)
INCONCLUSIVE = (*LAUNCH_ONLY, Outcome("MEM103", "memory-grows", OutcomeKind.INCONCLUSIVE, "too short"))
WARNING = replace(FINDING, severity=Severity.WARNING)


def code(ending: Ending = OK, outcomes: tuple[Outcome, ...] = OUTCOMES, findings: tuple[Finding, ...] = (), fail_on: str = "error") -> int:
    return exit_code(ending, outcomes, findings, fail_on=fail_on, substantial=SUBSTANTIAL)


def test_sane() -> None:
    assert code() == 0


@pytest.mark.parametrize("outcomes", [(), LAUNCH_ONLY, INCONCLUSIVE])
def test_nothing_checked_is_never_sane(outcomes: tuple[Outcome, ...]) -> None:
    assert code(outcomes=outcomes) == 5


@pytest.mark.parametrize(
    ("severity", "fail_on", "expected"),
    [
        (Severity.ERROR, "error", 1), (Severity.WARNING, "error", 0), (Severity.WARNING, "warning", 1), (Severity.ADVICE, "warning", 0),
        (Severity.ADVICE, "advice", 1), (Severity.ERROR, "never", 0),
    ],
)  # fmt: skip
def test_fail_on(severity: Severity, fail_on: str, expected: int) -> None:
    assert code(findings=(replace(FINDING, severity=severity),), fail_on=fail_on) == expected


@pytest.mark.parametrize("ending", [Ending("hang"), Ending("timeout"), Ending("folder-deleted"), Ending(exits=exits(0, 1)), Ending(exits=exits(-9, 0))])
def test_a_failure_or_hang_is_1_whatever_fail_on_says(ending: Ending) -> None:
    assert code(ending, fail_on="never") == 1
    assert code(ending, outcomes=LAUNCH_ONLY) == 1


def test_a_rank_that_we_ended_did_not_fail() -> None:
    ended = tuple(replace(e, code=-15, by_us=True) for e in exits(0, 0))
    assert code(Ending("fail-fast", exits=ended), findings=(FINDING,)) == 1
    assert code(Ending("fail-fast", exits=ended)) == 5  # the suspicion did not last: cut short for nothing


def test_precedence() -> None:
    lost = Ending("launch-failed", started=False)
    assert code(lost, outcomes=LAUNCH_ONLY, findings=(FINDING,)) == 4
    assert code(lost, outcomes=CRASHED) == 3
    assert code(Ending("interrupted"), outcomes=CRASHED, findings=(FINDING,)) == 130
