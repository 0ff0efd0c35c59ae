"""PRF102 straggler: one rank is slower than the others, and all wait for it.

What it does
    Compares the time that each rank spends on its own work, from the end of a step to its first collective or backward. 1.3 times the
    median of the others and 5 ms more, in most steps, is a warning. Time in backward is not compared: the all-reduce makes it equal.

Why it is bad
    Every step takes as long as the slowest rank's. The others' time shows up as communication, so the network gets the blame.

Wrong
    if rank == 0:
        statistics(model)            # at every step, while the others wait

Right
    move it out of the loop, or do it every hundredth step

Known limits
    Needs 20 steps, and a core for each rank and loader worker; else it is inconclusive. Slow hardware and slow code look the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.prf import pace
from harness.model import Finding, Severity, Where
from harness.record import Recording, Run

MIN_STEPS = 20
RATIO, MORE_S = 1.3, 0.005
MOST = 0.7


class Straggler(Check):
    code = "PRF102"
    name = "straggler"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        trained = {rank: r for rank, r in enumerate(run.ranks) if r is not None and r.num_rows}
        if len(trained) < 2:
            raise NotApplicable("fewer than two ranks took steps")
        own = {rank: pace.column(r, "self_s") for rank, r in trained.items()}
        length = min(len(values) for values in own.values())
        if length < MIN_STEPS:
            raise Inconclusive(f"needs {MIN_STEPS} steps after the first {pace.WARM_UP_STEPS}")
        pace.require_cores(run)
        for rank, values in own.items():
            rest = [pace.median([own[r][i] for r in own if r != rank]) for i in range(length)]
            slow = sum(values[i] >= RATIO * rest[i] and values[i] - rest[i] >= MORE_S for i in range(length))
            if slow >= MOST * length:
                mine, others = pace.median(values), pace.median(rest)
                yield self.finding(
                    f"rank {rank} takes {mine * 1e3:.0f} ms of its own a step, the others {others * 1e3:.0f} ms, and they wait for it",
                    where=_slow_line(trained[rank]),
                    ranks=[rank],
                    notes=[f"slower in {slow} of {length} steps, {mine / max(others, 1e-9):.1f} times in the median"],
                    help="look at what only this rank does in every step: logging, statistics, a slower disk, a larger share of data",
                )
                return


def _slow_line(recording: Recording) -> Where | None:
    """The line in which the rank was seen most often without progress."""
    stalls = [e.where for e in recording.of("stall") if e.step > 0 and not e["op"] and e.where is not None]
    return stalls[-1] if stalls else None
