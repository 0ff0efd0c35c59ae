"""SHM105 where workers took some parameters of a shared model out of shared memory, and trained those in private."""

from __future__ import annotations

from typing import Any

from builder import event, findings
from test_shm import team

from harness.checks.shm.never_updated import SharedModelNeverUpdated
from harness.model import Severity
from harness.record import Run

PARTS: dict[str, Any] = {"names": ["conv1.weight"], "shapes": [[16, 3, 5, 5]]}


def taken(how: str | None = "forward", line: int = 73, left: dict[str, Any] = PARTS, out: dict[str, Any] | None = PARTS, **more: Any) -> Run:
    uses = (event("left_behind", line=41, module="Net", num_changed=6, how=how, t=10**14, **left),) if how else ()
    return team(changed=True, after=uses, child=(event("taken_out", line=line, **out),) if out else (), **more)


def test_part_of_a_shared_model_is_trained_in_private() -> None:
    (found,) = findings(SharedModelNeverUpdated, taken())
    assert found.severity is Severity.ERROR and found.where and found.where.line == 73
    assert "`conv1.weight` of the shared `Net`" in found.message and "on line 41" in found.notes[1]
    (found,) = findings(SharedModelNeverUpdated, taken(how="save"))
    assert found.severity is Severity.ADVICE
    inside = {"names": ["net.conv1.weight"], "shapes": PARTS["shapes"]}  # the worker puts it into a model of its own
    assert len(findings(SharedModelNeverUpdated, taken(out=inside))) == 1


def test_what_is_no_loss() -> None:
    other = {"names": ["conv1.weight"], "shapes": [[16, 3, 3, 3]]}  # another model of the worker's
    for healthy in (taken(how=None), taken(out=None), taken(out=other), taken(out={"names": ["fc.weight"], "shapes": PARTS["shapes"]})):
        assert findings(SharedModelNeverUpdated, healthy) == []
