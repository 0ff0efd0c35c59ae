"""LAU124 wall-limit: the run took longer than the limit and was ended.

What it does
    The run was still going when its time limit passed. An error, because it did not finish; the notes say how far each rank was,
    and where it stood if nothing had moved for a while.

Why it is bad
    What the script would have written at its end is missing, and nothing was checked beyond that point.

Wrong
    harness run train.py --timeout 60         # a training of ten minutes

Right
    harness run train.py --timeout 900, or fewer steps for the check

Known limits
    A run that stands still is told earlier, as a hang, where some rank waits for another; a lock that is never released, or a sleep, ends here.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.hng import waits
from harness.model import Finding, Severity
from harness.record import Run

STILL_S = 8.0  # the stalls that a rank tells of are 1, 2, 4, 8, ... s long


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
        still = _standing(run)
        idle = f", with no step, batch or collective for at least {min(s for _, s in still):.0f} s" if still else ""
        yield self.finding(
            f"the run was ended after its limit of {run.plan.timeout_s:g} s{idle}",
            where=still[0][0].where if still else None,
            notes=[*steps, *(f"rank {wait.rank} {wait.sentence}, for {stalled_s:.0f} s" for wait, stalled_s in still[:8])],
            help=("look at what is waited for at this line" if still[0][0].op else "see whether this line waits or works")
            + ", or raise --timeout"
            if still
            else "raise --timeout, or give the script fewer steps",
        )


def _standing(run: Run) -> list[tuple[waits.Wait, float]]:
    """(where it stood, seconds) of each rank, where all that reported stood still."""
    stalls = {rank: r.of("stall") for rank, r in enumerate(run.ranks) if r is not None}
    since = {
        rank: float(told[-1]["stalled_s"])
        for rank, told in stalls.items()
        if told and (r := run.ranks[rank]) is not None and told[-1].t_ns >= waits.last_moved(r) and isinstance(told[-1]["stalled_s"], (int, float))
    }
    found = [(wait, since[wait.rank]) for wait in waits.waits(run) if wait.rank in since and wait.where is not None]
    return found if len(found) == len(stalls) and all(s >= STILL_S for _, s in found) else []
