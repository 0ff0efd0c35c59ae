"""LAU137 requeued: Slurm put the job back into the queue and started it again.

What it does
    Tells how often the job was requeued. An advice: only the last attempt is judged, what the earlier ones wrote lies apart and is not read.

Why it is bad
    A script that writes its checkpoints and event files beside each other finds those of the attempt before: files that it did not write are
    there when it starts.

Wrong
    torch.save(state, "checkpoint.pt")      # half-written when the job was preempted; the next attempt loads it

Right
    torch.save(state, "checkpoint.tmp"); os.replace("checkpoint.tmp", "checkpoint.pt")

Known limits
    Why it was requeued is what Slurm says of the last attempt's job only.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.lau import slurm_job
from harness.model import Finding, Severity
from harness.record import Run


class Requeued(Check):
    code = "LAU137"
    name = "requeued"
    severity = Severity.ADVICE
    substantial = False

    def end(self, run: Run) -> Iterable[Finding]:
        job = slurm_job.scheduler(run)
        if job.attempt:
            times = "once" if job.attempt == 1 else f"{job.attempt} times"
            yield self.finding(
                f"the job was requeued {times}; attempt {job.attempt + 1} is the one that was judged",
                notes=[f"job {job.job_id}"],
                help="--slurm=--no-requeue lets a preempted or crashed job end instead",
            )
