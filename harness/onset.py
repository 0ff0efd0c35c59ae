"""How soon a mistake shows: its run's recording is judged again as it stood after fewer steps."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace

from harness.assembly import assemble
from harness.checks.engine import judge
from harness.model import Ending, Plan
from harness.probe import protocol
from harness.record import Recording
from harness.replay import provisional_codes


def steps_until(code: str, recordings: Sequence[Recording], plan: Plan, num_cores: int) -> int | None:
    """After how many optimizer steps of any rank `code` was told of a run that went on; None where its end, its output or a hang tells it.

    By bisection: what is told after some steps is told after more of them.
    """
    if code in provisional_codes():  # concludes from what has not come: only the end shows that
        return None

    def told(num_steps: int) -> bool:
        cut = [_until(recording, num_steps) for recording in recordings]
        run = assemble(plan, cut, ending=Ending(reason="running"), num_cores=num_cores, live=True)
        return any(finding.code == code for finding in judge(run, (code,))[1])

    longest = max((recording.num_steps for recording in recordings), default=0)
    found = bisect.bisect_left(range(longest + 1), True, key=told)
    return found if found <= longest else None


def _until(recording: Recording, num_steps: int) -> Recording:
    """As it stood when that many steps were taken and the next row was not yet there."""
    num_rows = bisect.bisect_left(recording.column("step"), num_steps)
    events = [event for event in recording.events if event.step <= num_steps and event.kind != protocol.END]
    return replace(recording, events=events, rows=recording.rows[: num_rows * protocol.ROW.size], rank=-1, damage="", status=None)
