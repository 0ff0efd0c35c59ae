"""LAU124 wall-limit: the run took longer than the limit and was ended.

What it does
    The run was still going when its time limit passed. An error, because it did not finish; the notes say how far each rank was.

Why it is bad
    What the script would have written at its end is missing, and nothing was checked beyond that point.

Wrong
    harness run train.py --timeout 60         # a training of ten minutes

Right
    harness run train.py --timeout 900, or fewer steps for the check

Known limits
    A run that stands still is told earlier, as a hang.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Run


class WallLimit(Check):
    code = "LAU124"
    name = "wall-limit"
    severity = Severity.ERROR
    substantial = False

    def end(self, run: Run) -> Iterable[Finding]:
        if run.live or run.ending.reason != "timeout":
            if run.live:
                raise NotApplicable("the run has not ended")
            return
        steps = [f"rank {rank} took {r.num_steps} steps" for rank, r in enumerate(run.ranks) if r is not None][:8]
        job = run.ending.scheduler
        if job is not None and job.state in ("TIMEOUT", "DEADLINE"):
            limit = "time limit" if job.state == "TIMEOUT" else "deadline"
            yield self.finding(
                f"Slurm ended the job at its {limit} ({job.state})",
                notes=[f"job {job.job_id}", *steps],
                help="ask for more with --slurm time=MINUTES, or give the script fewer steps"
                if job.state == "TIMEOUT"
                else "name a later --slurm deadline=..., or ask for less with --slurm time=MINUTES: a job that cannot end in time is not started",
            )
            return
        yield self.finding(
            f"the run was ended after its limit of {run.plan.timeout_s:g} s",
            notes=steps,
            help="raise --timeout, or give the script fewer steps",
        )
