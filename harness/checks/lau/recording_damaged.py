"""LAU125 recording-damaged: a rank's recording is not whole, so the other checks saw less than the rank did.

What it does
    Counts the lines of a recording that are no events, the step rows that are missing against the process's own last count, and the checks
    that stumbled over a value of another shape than the probe writes (advice). Where the probe itself failed at most steps this is a warning, and
    checks that found nothing are inconclusive. A torn last line is legal: a killed rank leaves one. A run folder that
    is deleted in mid-run ends the run, and is told here.

Why it is bad
    A check that reads half a recording may call a faulty run sane.

Wrong
    (a full disk, a file that was edited or cut, a copy that broke off)

Right
    run again with room on the disk of the run folder (`--out` names another place)

Known limits
    Damage that leaves well-formed lines and rows, and values of the right shape, is not seen. In a run that this version has just made, a value
    that a check cannot read is a mistake of the harness: please report it.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Run


class RecordingDamaged(Check):
    code = "LAU125"
    name = "recording-damaged"
    severity = Severity.ERROR
    substantial = False
    last = True

    def end(self, run: Run) -> Iterable[Finding]:
        if run.live:
            return
        if run.ending.reason == "folder-deleted":
            yield self.finding(
                "the run folder was deleted while the run went on, so the run was ended: nothing of it can be judged",
                help="keep the run folder until the run has ended; --out names another place",
            )
            return
        damaged = [r for r in run.processes if r.damage]
        if damaged:
            yield self.finding(
                f"the recording of {'rank ' + str(damaged[0].rank) if damaged[0].rank >= 0 else 'process ' + str(damaged[0].pid)} is damaged: {damaged[0].damage}",
                ranks=sorted({r.rank for r in damaged if r.rank >= 0}),
                notes=[f"{r.stem}: {r.damage}" for r in damaged[:8]],
                help="look at the space on the disk of the run folder and run again; --out names another folder",
            )
        elif run.mostly_lost is not None:
            lost, steps = run.mostly_lost
            yield self.finding(
                f"the probe failed at {lost} of {steps} optimizer steps, so little is known of them",
                notes=[f"{e['where']}: {e['error']}" for _, e in run.events(protocol.PROBE_ERROR)][:1],
                help="a bug of harness: please report it",
                severity=Severity.WARNING,
            )
        elif run.unreadable:
            num = len(run.unreadable)
            yield self.finding(
                f"{num} check{'s' if num > 1 else ''} could not read a value of the recording, and judged nothing",
                notes=run.unreadable[:8],
                help="a bug of harness if a run of this version left it: please report it; else the recording was edited, or made by another version",
                severity=Severity.ADVICE,  # a script is not to blame for what we stumble over; the checks are listed as inconclusive
            )
