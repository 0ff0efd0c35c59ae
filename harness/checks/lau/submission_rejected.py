"""LAU131 submission-rejected: Slurm took no job for this run.

What it does
    sbatch refused the script: a partition, account or option that does not exist, or a request that no node can meet. An error; nothing was
    started. The message is Slurm's own.

Why it is bad
    Nothing ran, so nothing was checked. What is wrong is in the request, not in the training.

Wrong
    harness run ddp_cifar --launcher slurm --slurm partition=gpuu

Right
    harness run ddp_cifar --launcher slurm --slurm partition=gpu      # sinfo shows what there is

Known limits
    A request that Slurm takes and can never start is LAU132, and only with --max-pending.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.lau import slurm_job
from harness.model import Finding, Severity
from harness.record import Run

HINTS = (
    ("partition", "sinfo lists the partitions; name one with --slurm partition=NAME"),
    ("account", "sacctmgr show assoc user=$USER lists your accounts; name one with --slurm account=NAME"),
    ("qos", "sacctmgr show qos lists them; name one with --slurm qos=NAME"),
    ("time limit", "ask for less time: --timeout, or --slurm time=MINUTES"),
    ("node configuration", "no node has what is asked for: lower -n, --slurm cpus-per-rank, mem or gpus; sinfo -N -l shows the nodes"),
    ("unrecognized option", "sbatch --help lists its options"),
)


class SubmissionRejected(Check):
    code = "LAU131"
    name = "submission-rejected"
    severity = Severity.ERROR
    substantial = False

    def end(self, run: Run) -> Iterable[Finding]:
        job = slurm_job.scheduler(run)
        if not job.rejected:
            return
        low = job.rejected.lower()
        yield self.finding(
            f"Slurm took no job: {job.rejected[:400]}",
            notes=[f"asked for: {' '.join(f'--{k}={v}' if v else f'--{k}' for k, v in sorted(run.plan.slurm.options.items()))}"]
            if run.plan.slurm is not None and run.plan.slurm.options
            else [],
            help=next((hint for word, hint in HINTS if word in low), "--dry-run prints what was submitted"),
        )
