"""LAU134 job-ended-from-outside: somebody or something else ended the job: scancel, preemption, a revoked reservation.

What it does
    Slurm ended the job as CANCELLED, PREEMPTED, REVOKED or the like, and it was not us. An error, because the run did not finish. What the ranks
    had written by then was judged.

Why it is bad
    What comes after is missing; failures of ranks at that moment are consequences.

Wrong
    scancel 4711                 # by a colleague, or by the site's own limits

Right
    harness run ... --slurm qos=normal      # a queue whose jobs are not preempted

Known limits
    Slurm says who cancelled a job only in its accounts (sacct -j ID -o State).
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.lau import slurm_job
from harness.model import Finding, Severity
from harness.record import Run

OURS = ("interrupted", "hang", "timeout", "fail-fast", "pending", "detached")
HELP = {
    "PREEMPTED": "take a partition or qos whose jobs are not preempted, or let it be requeued (--slurm=--requeue)",
    "CANCELLED": "ask who cancelled it: sacct -j ID -o State,Comment, where the site keeps accounts",
}


class JobEndedFromOutside(Check):
    code = "LAU134"
    name = "job-ended-from-outside"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU101", "LAU102", "LAU121", "LAU122", "LAU124", "HNG*")

    def end(self, run: Run) -> Iterable[Finding]:
        job = slurm_job.scheduler(run)
        if run.ending.reason != "scheduler" or job.state in ("NODE_FAIL", "BOOT_FAIL"):
            return
        steps = max((r.num_steps for r in run.present), default=0)
        yield self.finding(
            f"the job was ended from outside: {job.state}",
            notes=[slurm_job.said(job), f"the ranks had taken up to {steps} steps"],
            help=HELP.get(job.state, f"scontrol show job {job.job_id} tells more"),
        )
