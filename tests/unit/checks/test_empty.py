"""Recordings that hold nothing: no check may count as one that looked at the training, and none may crash or accuse."""

from __future__ import annotations

import pytest
from builder import event, recording, run

from harness.checks.engine import judge
from harness.checks.registry import all_checks
from harness.model import OutcomeKind, Severity

SUBSTANTIAL = {check.code for check in all_checks() if check.substantial}


@pytest.mark.parametrize(
    "events",
    [
        [],
        [event("end", how="exit", steps=0)],
        [event("torch", version="2.14.1", threads=1), event("print", line=1, text="no training here", stream=1), event("end", how="exit", steps=0)],
    ],
    ids=["nothing", "an end", "torch and a line"],
)
def test_a_run_without_training_is_checked_by_nothing(events: list[object]) -> None:
    outcomes, findings = judge(run([recording(list(events), rank=rank, world_size=2) for rank in (0, 1)]))  # type: ignore[arg-type]
    assert {o.code for o in outcomes if o.kind is OutcomeKind.RAN} & SUBSTANTIAL == set()
    assert [f for f in findings if f.severity > Severity.ADVICE] == []
    assert [o.code for o in outcomes if o.kind is OutcomeKind.CRASHED] == []
