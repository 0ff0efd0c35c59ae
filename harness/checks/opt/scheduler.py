"""OPT104 scheduler-stepped-per-rank: the scheduler is stepped several times an optimizer step

What it does
    Counts scheduler steps between optimizer steps. As many as there are ranks is a warning; advice where the schedule was made long enough to
    last all the same.

Why it is bad
    A schedule meant for N steps ends after N / world_size of them: the learning rate decays too fast.

Wrong
    for _ in range(world_size): scheduler.step()

Right
    scheduler.step()                      # once an optimizer step

Known limits
    A schedule that is stepped once an epoch is healthy and silent; so is one a step for each of several schedulers, and one for each
    micro-batch of an accumulation.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run


class SchedulerPerRank(Check):
    code = "OPT104"
    name = "scheduler-stepped-per-rank"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if run.world_size < 2:
            raise NotApplicable("one process")
        events = [(rank, e) for rank, e in run.events("scheduler")]
        if not events:
            raise NotApplicable("no learning rate scheduler is stepped")
        by_rank: dict[int, list[Event]] = {}
        for rank, event in events:
            by_rank.setdefault(rank, []).append(event)
        for rank, own in by_rank.items():
            counts: Counter[tuple[object, int]] = Counter((e["id"], e.step) for e in own if e.step > 0)
            many = [n for n in counts.values() if n == run.world_size]
            recording = run.ranks[rank]
            if len(many) >= 3 and len(many) >= 0.9 * len(counts) and recording is not None and not _by_micro_batch(run, recording):
                total = _total(recording, {e["id"] for e in own})
                lasts = total >= 0.9 * run.world_size * recording.num_steps
                yield self.finding(
                    f"the scheduler is stepped {run.world_size} times an optimizer step, once for each rank"
                    + ("" if lasts else f": its schedule ends {run.world_size} times too early"),
                    severity=Severity.ADVICE if lasts else None,
                    where=events[-1][1].where,
                    ranks=run.rank_ids,
                    notes=[f"{len(many)} of {len(counts)} steps", *([f"it was made for {total}: long enough, if that counts all ranks' steps"] if lasts else [])],
                    help="step the scheduler once an optimizer step; every rank has a scheduler of its own",
                )
                return


def _by_micro_batch(run: Run, recording: Recording) -> bool:
    """As many backwards a step as scheduler steps: the schedule is counted in micro-batches."""
    backwards = recording.column("num_backward")
    return len(backwards) > 0 and statistics.median(backwards) == run.world_size


def _total(recording: Recording, ids: set[object]) -> int:
    """The length that the schedule was made for; 0: not known."""
    return max((n for e in recording.of("scheduler_made") if e["id"] in ids for n in e["totals"] or () if isinstance(n, int)), default=0)
