"""PRF110 anomaly-mode-left-on: autograd's anomaly detection is on while the model is trained.

What it does
    Counts the optimizer steps during which `torch.autograd.set_detect_anomaly(True)` or `detect_anomaly()` was on. Twenty and more, and over
    half of all steps, are a warning at the statement that switched it on.

Why it is bad
    It is a debugging aid: each operation of the forward notes its stack, each of the backward checks its result for NaN. Training takes
    several times as long.

Wrong
    torch.autograd.set_detect_anomaly(True)          # at the top of the script

Right
    with torch.autograd.detect_anomaly():            # around the step that fails, while you look for it
        loss.backward()

Known limits
    Advice where the command line asks for it (a debugging or anomaly option).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Recording, Run, number

MIN_STEPS, MIN_SHARE = 20, 0.5
_ASKED = re.compile(r"debug|anomal", re.IGNORECASE)


class AnomalyModeLeftOn(Check):
    code = "PRF110"
    name = "anomaly-mode-left-on"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        trained = [r for r in run.processes if r.num_rows]
        if not trained:
            raise NotApplicable("no process took an optimizer step")
        found = [(max(r.rank, r.env_rank, 0), r, e) for r in trained for e in r.of("anomaly")[-1:] if e.where is not None and _mostly(r)]
        if not found:
            return
        _, recording, event = max(found, key=lambda one: number(one[2]["steps"]))
        yield self.finding(
            f"autograd's anomaly detection was on during {event['steps']} and more training steps: it slows forward and backward down",
            where=event.where,
            ranks=sorted({rank for rank, _, _ in found}),
            severity=Severity.ADVICE if _asked(recording) else None,
            notes=[f"{recording.num_steps} steps in all"],
            help="remove it, or switch it on only while you look for a NaN (`with torch.autograd.detect_anomaly():`)",
        )


def _mostly(recording: Recording) -> bool:
    """The event comes at 20, 40, 80 steps: that many at least, at most twice as many."""
    steps = number(recording.of("anomaly")[-1]["steps"])
    return steps >= MIN_STEPS and 2 * steps >= MIN_SHARE * recording.num_steps


def _asked(recording: Recording) -> bool:
    argv = recording.start.get("argv")
    return isinstance(argv, list) and any(_ASKED.search(str(one)) for one in argv[1:])
