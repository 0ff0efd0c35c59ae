"""PRF102 straggler: one rank is slower than the others, and all wait for it.

What it does
    Compares the time that each rank spends on its own work, from the end of a step to its first collective or backward. 1.3 times the
    median of the others and 5 ms more (steps in which a rank waited for a core are left out), in 80 % of the steps and beyond twice the
    uncertainty of the median difference, is a warning (2 times on a host whose load is above its cores). Time in backward is not
    compared: the all-reduce makes it equal.

Why it is bad
    Every step takes as long as the slowest rank's. The others' time shows up as communication, so the network gets the blame.

Wrong
    if rank == 0:
        statistics(model)            # at every step, while the others wait

Right
    move it out of the loop, or do it every hundredth step

Known limits
    Needs 20 steps, and a core for each rank and loader worker; else it is inconclusive. Slow hardware and slow code look the same. The
    line comes from 10 samples a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.prf import pace
from harness.model import Finding, Severity, Where
from harness.record import Recording, Run, where_of

MIN_STEPS = 20
CALM_S = 0.002  # of waiting for a core in a step that counts
RATIO, MORE_S, MOST = 1.3, 0.005, 0.8
BUSY_RATIO, BUSY_MOST = 2.0, 0.8  # on a host that has other work to do


class Straggler(Check):
    code = "PRF102"
    name = "straggler"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        trained = {rank: r for rank, r in enumerate(run.ranks) if r is not None and r.num_rows}
        if len(trained) < 2:
            raise NotApplicable("fewer than two ranks took steps")
        own = _calm(trained)
        length = min(len(values) for values in own.values())
        if length < MIN_STEPS:
            raise Inconclusive(f"needs {MIN_STEPS} steps in which no rank waits for a core, after the first {pace.WARM_UP_STEPS}")
        pace.require_cores(run)
        busy = pace.busy(run)
        ratio, most = (BUSY_RATIO, BUSY_MOST) if busy else (RATIO, MOST)
        in_order = [sorted(values) for values in zip(*own.values(), strict=True)]
        for rank, values in own.items():
            rest = [pace.median_without(value, ordered) for value, ordered in zip(values, in_order, strict=True)]
            slow = sum(values[i] >= ratio * rest[i] and values[i] - rest[i] >= MORE_S for i in range(length))
            if slow < most * length:
                continue
            more, error = pace.paired([values[i] - rest[i] for i in range(length)])
            others = pace.median(rest)
            if more - 2 * error >= max(MORE_S, (ratio - 1) * others):
                yield self.finding(
                    f"rank {rank} takes {more * 1e3:.0f} ms more of its own a step than the others, and they wait for it",
                    where=_slow_line(rank, trained),
                    ranks=[rank],
                    notes=[
                        f"{pace.median(values) * 1e3:.0f} ms against {others * 1e3:.0f} ms, slower in {slow} of {length} steps",
                        f"difference {more * 1e3:.1f} +- {error * 1e3:.1f} ms a step",
                    ],
                    help="look at what only this rank does in every step: logging, statistics, a slower disk, a larger share of data",
                )
                return
        if busy:
            raise Inconclusive(f"the host has other work: load {busy:.1f} on {run.num_cores} cores")


def _calm(trained: Mapping[int, Recording]) -> dict[int, list[float]]:
    """Seconds of each rank's own work, in the steps in which no rank waited for a core: what the run queue took is the host's doing."""
    own = {rank: _own(r) for rank, r in trained.items()}
    queues = [pace.column(r, "queue_s") for r in trained.values()]
    length = min(len(v) for v in own.values())
    calm = [i for i in range(length) if all(q[i] < CALM_S for q in queues)]
    return {rank: [values[i] for i in calm] for rank, values in own.items()}


def _own(recording: Recording) -> list[float]:
    """Seconds a step that no other rank can have caused: up to the first collective or backward, and inside the optimizer's step with its
    hooks, where no collective and no closure's backward lies in there."""
    names = ("self_s", "step_s", "backward_s", "coll_s", "wall_s")
    rows = zip(*(pace.column(recording, name) for name in names), strict=True)
    return [own + (step if coll == 0 and own + step + backward <= 1.05 * wall else 0.0) for own, step, backward, coll, wall in rows]


def _slow_line(rank: int, trained: Mapping[int, Recording]) -> Where | None:
    """The line in which this rank was seen more often than the others were, by samples of the main thread."""
    mine = _profile(trained[rank])
    others = [_profile(r) for other, r in trained.items() if other != rank]
    excess = {place: share - max((o.get(place, (0.0, w))[0] for o in others), default=0.0) for place, (share, w) in mine.items()}
    best = max(excess, key=lambda place: excess[place], default=None)
    return mine[best][1] if best is not None and excess[best] >= 0.1 else None


def _profile(recording: Recording) -> dict[tuple[str, int], tuple[float, Where]]:
    """Line -> (share of all samples in which the main thread was there, the line)."""
    counts: dict[tuple[str, int], tuple[int, Where]] = {}
    total = 0
    for event in recording.of("profile"):
        total += event["samples"] if isinstance(event["samples"], int) else 0
        for entry in event["lines"] if isinstance(event["lines"], list) else []:
            where = where_of(entry[0]) if isinstance(entry, list) and len(entry) == 2 else None
            if where is not None and isinstance(entry[1], int):
                key = (where.file, where.line)
                counts[key] = (counts.get(key, (0, where))[0] + entry[1], where)
    return {key: (num / max(1, total), where) for key, (num, where) in counts.items()}
