"""LAU126 launcher-failed: the launcher ended in mid-run, and the ranks with it.

What it does
    The process that starts and watches the ranks (torchrun's agent, or our supervisor, also on a node of a Slurm job) was killed or failed while
    they ran. An error: the training did not finish, and no rank is to blame; ranks that then lost their peers are victims.

Why it is bad
    The ranks are torn down with it; their own output ends in mid-sentence or speaks of a signal, and the search begins in the script.

Wrong
    pkill -f torchrun                # on a machine where another job runs
    (a limit of the batch system that counts the agent, memory that runs out)

Right
    kill PID                         # of the process that is meant

Known limits
    Who killed it is not recorded by Linux.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import blame
from harness.model import Finding, Severity
from harness.record import Run


class LauncherFailed(Check):
    code = "LAU126"
    name = "launcher-failed"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU101", "LAU102", "LAU122", "HNG*")

    def end(self, run: Run) -> Iterable[Finding]:
        if run.live or not run.ending.started:
            raise NotApplicable("no run of a launcher has ended")
        error = run.ending.launcher_error
        first_fall = blame.culprit(run)
        if run.ending.reason != "exited" or not error or (first_fall is not None and not first_fall.victim):
            return
        first, *rest = error.splitlines()
        torn = sorted(e.rank for e in run.ending.exits if e.by_us)
        yield self.finding(
            first,
            notes=[*([f"{blame.plural(torn)} {'was' if len(torn) == 1 else 'were'} ended with it"] if torn else []), *rest[-4:]],
            help="look who ended it: somebody at the machine, a limit of the batch system, or memory; the script is not to blame",
        )
