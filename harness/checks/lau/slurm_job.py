"""What the checks of Slurm runs share: whether there is a job at all, and which ranks were on which node."""

from __future__ import annotations

from harness.checks.base import NotApplicable
from harness.model import Scheduler
from harness.record import Run


def scheduler(run: Run) -> Scheduler:
    """What Slurm says of the job; not applicable where the run is no job's, or goes on."""
    if run.plan.launcher != "slurm":
        raise NotApplicable("the run was not made by Slurm")
    if run.live or run.ending.scheduler is None:
        raise NotApplicable("the job has not ended")
    return run.ending.scheduler


def ranks_by_host(run: Run) -> dict[str, list[int]]:
    """Host -> ranks, as the ranks themselves say."""
    table: dict[str, list[int]] = {}
    for rank, recording in enumerate(run.ranks):
        if recording is not None and isinstance(host := recording.start.get("host"), str):
            table.setdefault(host, []).append(rank)
    return table


def lost_ranks(run: Run) -> list[int]:
    """Ranks that were started and of whose end nobody told: what a node takes along when it goes."""
    told = {e.rank for e in run.ending.exits}
    return [rank for rank, recording in enumerate(run.ranks) if recording is not None and rank not in told]


def said(job: Scheduler) -> str:
    """Job, state and reason, for a note."""
    reason = f" ({job.reason})" if job.reason else ""
    where = f" on {job.nodes}" if job.nodes else ""
    return f"Slurm says {job.state}{reason} of job {job.job_id}{where}"
