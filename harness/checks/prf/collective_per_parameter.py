"""PRF112 collective-per-parameter: gradients are averaged by hand with one small blocking collective for each parameter.

What it does
    Looks at the all-reduces of gradients that the script issues itself: how many a step from one statement, how large, and how long one takes
    (the median of the distances from call to call, so that a wait for a slower rank does not count). Where 24 and more small ones take a
    quarter of the step it is advice, where 48 and more take two fifths a warning.

Why it is bad
    A small message costs its latency, whatever is in it: a hundred of them cost a hundred latencies, one after the other, where one message of
    all gradients costs one.

Wrong
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world_size

Right
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)                     # or DistributedDataParallel, which fills buckets while backward runs

Known limits
    Large gradients are bound by bandwidth, not by their number, and are left out. A machine with more ranks than cores tells latencies that are
    not the network's: advice there.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.model import Finding, Severity, Where
from harness.record import Event, Recording, Run, number

WEAK, STRONG = (24, 0.25), (48, 0.4)  # collectives a step, share of the step
MIN_STEPS, MIN_S = 8, 0.5
SMALL = 65_536  # elements; 256 kB take about as long to send as a message takes at all


@dataclass(frozen=True)
class Load:
    """What the collectives of one statement cost one rank."""

    where: Where
    num: int  # a step
    numel: int  # in all of them
    each_s: float
    step_s: float

    @property
    def share(self) -> float:
        return min(1.0, self.num * self.each_s / self.step_s) if self.step_s > 0 else 0.0


class CollectivePerParameter(Check):
    code = "PRF112"
    name = "collective-per-parameter"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        trained = [(rank, r) for rank, r in enumerate(run.ranks) if r is not None and r.num_rows and r.of("coll")]
        if run.world_size < 2 or not any(e["grad"] for _, r in trained for e in r.of("coll")):
            raise NotApplicable("no gradients are averaged by hand")
        loads = [(rank, load) for rank, r in trained for load in _loads(r)]
        if not loads:
            if max(r.num_rows for _, r in trained) < MIN_STEPS:
                raise Inconclusive(f"fewer than {MIN_STEPS} steps")
            return
        rank, worst = max(loads, key=lambda one: one[1].share)
        if worst.share < WEAK[1]:
            return
        crowded = len(run.present) > run.num_cores * max(1, run.plan.nodes)
        strong = worst.num >= STRONG[0] and worst.share >= STRONG[1] and not crowded
        yield self.finding(
            f"{worst.num} small gradients are all-reduced one by one in every step: {worst.share:.0%} of its time",
            where=worst.where,
            ranks=sorted({r for r, _ in loads}),
            severity=None if strong else Severity.ADVICE,
            notes=[
                f"rank {rank}: {1e3 * worst.each_s:.2f} ms each, {1e3 * worst.num * worst.each_s:.1f} of {1e3 * worst.step_s:.1f} ms a step, "
                f"{worst.numel} numbers in all"
            ],
            help="average them in one message (`torch.cat` of the flattened gradients, or all_reduce_coalesced), or use DistributedDataParallel",
        )


def _loads(recording: Recording) -> list[Load]:
    by_place: dict[tuple[str, int], dict[int, list[Event]]] = {}
    for event in recording.of("coll"):
        if event["grad"] and event["op"] == "all_reduce" and not event["hook"] and event.where is not None:
            by_place.setdefault((event.where.file, event.where.line), {}).setdefault(event.step, []).append(event)
    found = (_load(recording, steps) for steps in by_place.values())
    return [one for one in found if one is not None]


def _load(recording: Recording, steps: dict[int, list[Event]]) -> Load | None:
    whole = [s for s in sorted(steps)[:-1] if s in recording.step_index]  # the last one may have met the end of what is told
    nums = [len(steps[s]) for s in whole]
    rows = [recording.row(recording.step_index[s]) for s in whole]
    if len(whole) < MIN_STEPS or min(nums) < WEAK[0] or sum(r.wall_s for r in rows) < MIN_S:
        return None
    first = steps[whole[0]]
    sizes = [number(e["numel"]) for e in first]
    if statistics.fmean(sizes) > SMALL or first[0].where is None:
        return None
    apart = [(b.t_ns - a.t_ns) / 1e9 for s in whole for a, b in itertools.pairwise(steps[s])]
    inside = [r.coll_s / max(1, r.num_coll) for r in rows]  # without what the script does in between
    each_s = min(statistics.median(apart), statistics.median(inside))
    return Load(first[0].where, int(statistics.median(nums)), sum(sizes), each_s, statistics.median(r.wall_s for r in rows))
