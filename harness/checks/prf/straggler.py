"""PRF102 straggler: one rank is slower than the others, and all wait for it.

What it does
    Compares the time that each rank spends on its own work: from the end of a step to its first collective or backward; under DDP on the CPU also
    between the one backward of a step and the optimizer's step, where no collective lies in there. 1.3 times the median of the others and 5 ms
    more, in 80 % of the steps and beyond twice the uncertainty of the median difference, is a warning (3 times, in 90 %, on a host whose load is
    above its cores, unless the same rank's batches are 1.3 times as large as the others' in every pass over the data). What a rank waited for a
    core is taken from its own time; where it is not known in which part of a step it waited, from the suspect's only, so that a crowded host can
    hide a straggler but not make one. Time in backward is not compared: the all-reduce makes it equal.

Why it is bad
    Every step takes as long as the slowest rank's. The others' time shows up as communication, so the network gets the blame.

Wrong
    if rank == 0:
        statistics(model)            # at every step, while the others wait

Right
    move it out of the loop, or do it every hundredth step

Known limits
    Needs 20 steps, and a core for each rank and loader worker; else it is inconclusive. Slow hardware and slow code look the same. The
    line comes from 10 samples a second, or is that of the loader with the larger batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.prf import batchwork, pace
from harness.model import Finding, Severity, Where
from harness.record import Recording, Run, where_of

MIN_STEPS = 20
MAX_LOOKED_AT = 100_000  # steps of all ranks together: a rank that is slow is so in a tenth of them too
CALM_S = 0.002  # of waiting for a core in an unknown part of a step
RATIO, MORE_S, MOST = 1.3, 0.005, 0.8
BUSY_RATIO, BUSY_MOST = 3.0, 0.9  # a rank whose core is shared takes up to twice the time and more; on a host that has other work to do


class Straggler(Check):
    code = "PRF102"
    name = "straggler"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        trained = {rank: r for rank, r in enumerate(run.ranks) if r is not None and r.num_rows}
        if len(trained) < 2:
            raise NotApplicable("fewer than two ranks took steps")
        stride = max(1, sum(r.num_rows for r in trained.values()) // MAX_LOOKED_AT)
        own = {rank: _own(r, stride, ()) for rank, r in trained.items()}
        length = min(len(values) for values in own.values())
        if length < MIN_STEPS:
            raise Inconclusive(f"needs {MIN_STEPS} steps after the first {pace.WARM_UP_STEPS}")
        pace.require_cores(run)
        busy, heavier = pace.busy(run), batchwork.heavier(trained)
        looked_at = [own]
        if _waits_in_backward(run):
            behind = _behind(trained, stride)
            looked_at.append({rank: _own(r, stride, behind[rank]) for rank, r in trained.items()})
        found = next((f for one in looked_at if (f := self._slow(trained, one, bool(busy))) is not None), None)
        if found is None and busy and heavier is not None:  # more work is no matter of the load
            calmly = (self._slow(trained, one, busy=False) for one in looked_at)
            found = next((f for f in calmly if f is not None and f.ranks == (heavier.rank,)), None)
        if found is not None:
            yield _with_its_batches(found, heavier)
            return
        calm = sum(all(values[i][0] - values[i][1] < CALM_S for values in own.values()) for i in range(length))
        if calm < MIN_STEPS:
            raise Inconclusive(f"needs {MIN_STEPS} steps in which no rank waits for a core, {calm} of {length} are such")
        if busy:
            raise Inconclusive(f"the host has other work: load {busy:.1f} on {run.num_cores} cores")

    def _slow(self, trained: Mapping[int, Recording], own: Mapping[int, Sequence[tuple[float, float]]], busy: bool) -> Finding | None:
        """The rank that is slow by (most, least) seconds of each step."""
        ratio, share = (BUSY_RATIO, BUSY_MOST) if busy else (RATIO, MOST)
        most_s = {rank: [most for most, _ in values] for rank, values in own.items()}
        length = min(len(values) for values in most_s.values())
        in_order = [sorted(values) for values in zip(*most_s.values(), strict=False)]
        for rank, most in most_s.items():
            least = [least for _, least in own[rank]]
            rest = [pace.median_without(value, ordered) for value, ordered in zip(most, in_order, strict=False)]
            slow = sum(least[i] >= ratio * rest[i] and least[i] - rest[i] >= MORE_S for i in range(length))
            if slow < share * length:
                continue
            more, error = pace.paired([least[i] - rest[i] for i in range(length)])
            others = pace.median(rest)
            if more - 2 * error >= max(MORE_S, (ratio - 1) * others):
                return self.finding(
                    f"rank {rank} takes {more * 1e3:.0f} ms more of its own a step than the others, and they wait for it",
                    where=_slow_line(rank, trained),
                    ranks=[rank],
                    notes=[
                        f"{pace.median(least) * 1e3:.0f} ms against {others * 1e3:.0f} ms, slower in {slow} of {length} steps",
                        f"difference {more * 1e3:.1f} +- {error * 1e3:.1f} ms a step",
                    ],
                    help="look at what only this rank does in every step: logging, statistics, a slower disk, a larger share of data",
                )
        return None


def _with_its_batches(found: Finding, heavier: batchwork.Heavier | None) -> Finding:
    if heavier is None or found.ranks != (heavier.rank,):
        return found
    note = f"its batches are {heavier.times:.1f} times as large as the others' in every pass over the data: {heavier.own:,.0f} against {heavier.others:,.0f} numbers"
    advice = "give all ranks batches of like size: deal what is sorted by length in turn (`order[rank::world_size]`), do not cut it into one part a rank"
    return replace(found, where=found.where or heavier.where, notes=(*found.notes, note), help=advice)


def _own(recording: Recording, stride: int, behind: Sequence[float]) -> list[tuple[float, float]]:
    """(most, least) seconds a step that no other rank can have caused: up to the first collective or backward, inside the optimizer's step with its
    hooks, where no collective and no closure's backward lies in there, and `behind` the backward. What it waited for a core is left out. Of every
    `stride`-th step, the same ones on all ranks."""
    names = ("self_s", "self_queue_s", "queue_s", "step_s", "backward_s", "coll_s", "wall_s")
    found = []
    for i, (before, before_queue, queue, step, backward, coll, wall) in enumerate(zip(*(pace.column(recording, n)[::stride] for n in names), strict=True)):
        own = max(0.0, before - before_queue)
        step = step if coll == 0 and before + step + backward <= 1.05 * wall else 0.0
        step += behind[i] if i < len(behind) else 0.0
        found.append((own + step, own + max(0.0, step - max(0.0, queue - before_queue))))
    return found


def _waits_in_backward(run: Run) -> bool:
    """DDP on the CPU: backward returns when the gradients are there. On a device the next number that is read waits for them, with the others' time."""
    params = [e["devices"] or () for _, e in run.events("params")]
    return any(True for _ in run.events("wrap")) and bool(params) and all(set(devices) == {"cpu"} for devices in params)


def _behind(trained: Mapping[int, Recording], stride: int) -> dict[int, list[float]]:
    """Seconds from the backward to the optimizer's step, in steps of one backward and no collective on every rank; 0 in others: what one rank
    spends there and another elsewhere is not to be compared."""
    columns = {rank: _after_backward(r, stride) for rank, r in trained.items()}
    alike = [all(value is not None for value in values) for values in zip(*columns.values(), strict=False)]
    return {rank: [(value or 0.0) if same else 0.0 for value, same in zip(values, alike, strict=False)] for rank, values in columns.items()}


def _after_backward(recording: Recording, stride: int) -> list[float | None]:
    """None where more than the one backward lies between the first synchronisation and the step. The probe's own time is left out."""
    names = ("self_s", "step_s", "backward_s", "coll_s", "wall_s", "probe_s", "num_backward")
    return [
        max(0.0, wall - before - step - backward - probe) if coll == 0 and num == 1 and before + step + backward <= 1.05 * wall else None
        for before, step, backward, coll, wall, probe, num in zip(*(pace.column(recording, n)[::stride] for n in names), strict=True)
    ]


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
