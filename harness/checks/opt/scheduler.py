"""OPT104 scheduler-stepped-per-rank: the scheduler is stepped several times an optimizer step

What it does
    Counts scheduler steps between optimizer steps.

Why it is bad
    A schedule meant for N steps ends after N / world_size of them: the learning rate decays too fast.

Wrong
    for _ in range(world_size): scheduler.step()

Right
    scheduler.step()                      # once an optimizer step

Known limits
    A schedule that is stepped once an epoch is healthy and silent; so is one a step for each of several schedulers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Run


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
        for own in by_rank.values():
            counts: Counter[tuple[object, int]] = Counter((e["id"], e.step) for e in own if e.step > 0)
            many = [n for n in counts.values() if n == run.world_size]
            if len(many) >= 3 and len(many) >= 0.9 * len(counts):
                yield self.finding(
                    f"the scheduler is stepped {run.world_size} times an optimizer step, once for each rank: its schedule "
                    f"ends {run.world_size} times too early",
                    where=events[-1][1].where,
                    ranks=run.rank_ids,
                    notes=[f"{len(many)} of {len(counts)} steps"],
                    help="step the scheduler once an optimizer step; every rank has a scheduler of its own",
                )
                return
