"""LAU122 left-behind: something of the run outlived it.

What it does
    After the ranks have ended, the supervisor looks for processes, ports and shared memory of the run that are still there. A warning.

Why it is bad
    A process that outlives its rank holds memory, a GPU and the port that the next run wants. Segments in /dev/shm stay until the machine
    restarts.

Wrong
    worker = mp.Process(target=prefetch)
    worker.start()                        # never joined

Right
    worker = mp.Process(target=prefetch, daemon=True)
    ...
    worker.join()

Known limits
    Looks on the nodes that the launcher reaches.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Run


class LeftBehind(Check):
    code = "LAU122"
    name = "left-behind"
    severity = Severity.WARNING
    substantial = False

    def end(self, run: Run) -> Iterable[Finding]:
        if run.live:
            raise NotApplicable("the run has not ended")
        left = [text for text in run.ending.left_behind if text]
        if left:
            first = next((e.where for r in run.processes for e in r.of("process_start") if e.where is not None), None)
            yield self.finding(
                f"{len(left)} thing{'s' if len(left) > 1 else ''} outlived the run: {left[0]}",
                where=first if "process" in left[0] else None,
                notes=left[1:8],
                help="join or end every process that the script starts, and unlink shared memory, before the rank ends",
            )
