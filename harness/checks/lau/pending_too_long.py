"""LAU132 pending-too-long: the job waited longer than --max-pending allows and was cancelled.

What it does
    Looks how long Slurm kept the job waiting, and why. An error; no line of the script ran. The notes give Slurm's reason.

Why it is bad
    A job can wait for ever: for nodes that are down, for a quota that is used up, for a dependency that never comes.

Wrong
    harness run all --launcher slurm --slurm nodelist=n17      # n17 is drained

Right
    harness run all --launcher slurm                           # any node will do

Known limits
    Without --max-pending we wait as long as Slurm does.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.lau import slurm_job
from harness.model import Finding, Severity
from harness.record import Run

HINTS = {
    "Priority": "others come first: wait longer, or take a partition or qos with a higher priority",
    "Resources": "the nodes are busy: wait longer, or ask for less",
    "ReqNodeNotAvail": "a node that was asked for is down or drained; leave nodelist out",
    "PartitionDown": "the partition is down; take another one",
    "PartitionConfig": "the partition does not allow this size or time; scontrol show partition tells its limits",
    "PartitionTimeLimit": "the partition allows less time; lower --timeout or --slurm time",
    "QOSMaxCpuPerUserLimit": "your quota is used up by jobs that run",
    "AssocGrpCpuLimit": "your account's quota is used up",
    "Dependency": "the job that it depends on has not ended",
}


class PendingTooLong(Check):
    code = "LAU132"
    name = "pending-too-long"
    severity = Severity.ERROR
    substantial = False

    def end(self, run: Run) -> Iterable[Finding]:
        job = slurm_job.scheduler(run)
        if run.ending.reason != "pending":
            return
        why = job.reason or "Slurm gave no reason"
        yield self.finding(
            f"the job waited {job.pending_s:.0f} s without being started, and was cancelled: {why}",
            notes=[f"job {job.job_id}"],
            help=next((hint for word, hint in HINTS.items() if why.startswith(word)), "raise --max-pending, or ask for less"),
        )
