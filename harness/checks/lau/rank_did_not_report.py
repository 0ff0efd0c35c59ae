"""LAU121 rank-did-not-report: a rank was started and the probe in it never spoke.

What it does
    Counts the ranks that were started and those that wrote a recording; a rank that became another program (`os.execv`) which wrote none is
    silent too. An error: about a silent rank nothing can be said.

Why it is bad
    Without a recording there is no check. "No finding" would then mean "nobody looked".

Wrong
    subprocess.run([sys.executable, "-I", "train.py"])      # -I and -S ignore PYTHONPATH and site: the probe is not loaded

Right
    subprocess.run([sys.executable, "train.py"])

Known limits
    A rank of an mp.spawn world that died before it imported torch is counted too.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import blame
from harness.model import Finding, Severity
from harness.record import Recording, Run

STOPPED = ("interrupted", "launch-failed", "running", "fail-fast", "folder-deleted")


class RankDidNotReport(Check):
    code = "LAU121"
    name = "rank-did-not-report"
    severity = Severity.ERROR
    substantial = False

    def end(self, run: Run) -> Iterable[Finding]:
        if run.live or not run.ending.started or run.ending.reason in STOPPED:
            raise NotApplicable("the run has not ended by itself")
        silent = [rank for rank, recording in enumerate(run.ranks) if recording is None or _taken_over(run, recording)]
        if silent:
            exits = {e.rank: e.code for e in run.ending.exits}
            said = [f"rank {rank} ended with {exits[rank]}" for rank in silent[:4] if rank in exits]
            yield self.finding(
                f"{blame.plural(silent)} did not report: nothing is known about {'it' if len(silent) == 1 else 'them'}",
                ranks=silent,
                notes=said,
                help="start the script by a plain `python` that reads PYTHONPATH (not -I, -S or -E), with the environment passed on",
            )


def _taken_over(run: Run, recording: Recording) -> bool:
    """Whether another program went on in its place (os.execv) and did not report: one that does bears the same pid."""
    return bool(recording.of("exec")) and not recording.of("end") and not any(p is not recording and p.pid == recording.pid for p in run.processes)
