"""Events that a sensor writes only where it has seen the mistake."""

from __future__ import annotations

from harness.checks.base import NotApplicable
from harness.record import Event, Run


def of(run: Run, kind: str) -> list[tuple[int, Event]]:
    """(rank, event); none where the sensor looked and saw nothing, NotApplicable where no rank took a step: it cannot have looked."""
    found = list(run.events(kind))
    if not found and not any(r.num_rows for r in run.present):
        raise NotApplicable("no step was taken")
    return found
