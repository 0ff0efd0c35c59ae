"""LAU138 run-folder-not-shared: nodes of the job cannot see the run folder.

What it does
    The job ran and ended, and some or all of its tasks left no word in the run folder. An error: what the ranks there did is not known.

Why it is bad
    Ranks write their recordings into the run folder, the controller reads them there. A folder on this machine's own disk (/tmp, a local home) is
    another folder on every node.

Wrong
    cd /tmp/me && harness run train.py --launcher slurm --nodes 2

Right
    cd /shared/me && harness run train.py --launcher slurm --nodes 2     # or --out /shared/me/run1

Known limits
    A task that is killed before it can write looks the same; the job's own log says more.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.lau import slurm_job
from harness.model import Finding, Severity
from harness.record import Run


class RunFolderNotShared(Check):
    code = "LAU138"
    name = "run-folder-not-shared"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU121", "LAU122", "HNG*")

    def end(self, run: Run) -> Iterable[Finding]:
        job = slurm_job.scheduler(run)
        slurm = run.plan.slurm
        tasks = run.plan.world_size if slurm is not None and slurm.ranks == "task" else run.plan.nodes
        if job.rejected or run.ending.reason not in ("exited", "launch-failed") or job.state != "FAILED" or len(run.nodes) >= tasks:
            return
        if not run.nodes and len(run.ending.launcher_error.splitlines()) > 1:
            return  # the job's own log came through the folder, so it is shared: what stands there is the cause
        seen = sorted({str(told.get("node")) for told in run.nodes})
        yield self.finding(
            f"{tasks - len(run.nodes)} of {tasks} tasks left no word in the run folder: it is not the same folder on every node",
            notes=[
                slurm_job.said(job),
                f"tasks reported from {', '.join(seen)}" if seen else "no task reported",
                *run.ending.launcher_error.splitlines()[-3:],
            ],
            help="run from a folder that all nodes share, or name one with --out; srun ls DIR shows what a node sees",
        )
