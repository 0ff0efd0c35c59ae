"""PRF112 collective-per-parameter: gradients, norms or other small numbers are sent one by one, a blocking collective for each parameter.

What it does
    Looks at the all-reduces of gradients that the script issues itself: how many a step from one statement, how large, and how long one takes (the
    mean distance from call to call in a step, without the longest, so that a wait for a slower rank does not count). Where 24 and more small ones
    take a quarter of the step it is advice, where 48 and more take two fifths a warning. So it is for other tensors of up to 1,024 numbers that one
    statement sends in every step, where the source shows that each turn of its loop sends what it has made of the loop's own variable.

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
    not the network's: advice there. Of tensors that are no gradients it is silent where a turn may need what an earlier one got back (an
    iteration, layers one after another, a state that is changed in place), where a result may end the loop, and where each turn sends to a group or
    rank of its own. A state that a turn changes under one name and reads under another is not seen.
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
TINY = 1024  # elements of what is no gradient: statistics, not activations
OPS = {"all_reduce": "all-reduced", "reduce": "reduced", "all_gather": "gathered"}


@dataclass(frozen=True)
class Load:
    """What the collectives of one statement cost one rank."""

    where: Where
    what: str
    num: int  # a step
    numel: int  # in all of them
    each_s: float
    step_s: float
    share: float  # of the step


class CollectivePerParameter(Check):
    code = "PRF112"
    name = "collective-per-parameter"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        trained = [(rank, r) for rank, r in enumerate(run.ranks) if r is not None and r.num_rows and r.of("coll")]
        if run.world_size < 2 or not any(e["grad"] or _place(e) in _apart(r) for _, r in trained for e in r.of("coll")):
            raise NotApplicable("no gradients are averaged by hand, and no loop sends what each of its turns makes")
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
            f"{worst.num} small {worst.what} one by one in every step: {worst.share:.0%} of its time",
            where=worst.where,
            ranks=sorted({r for r, _ in loads}),
            severity=None if strong else Severity.ADVICE,
            notes=[
                f"rank {rank}: {1e3 * worst.each_s:.2f} ms each, {1e3 * worst.num * worst.each_s:.1f} of {1e3 * worst.step_s:.1f} ms a step, "
                f"{worst.numel} numbers in all"
            ],
            help=_help(worst.what.startswith("gradients")),
        )


def _help(gradients: bool) -> str:
    if gradients:
        return "average them in one message (`torch.cat` of the flattened gradients, or all_reduce_coalesced), or use DistributedDataParallel"
    return "put them into one tensor (`torch.stack`) and send that; what is equal on all ranks, as gradients behind DDP's backward are, need not be sent"


Place = tuple[str, int, str]


def _place(event: Event) -> Place | None:
    """None of a collective that other code than a statement of the script's own issues."""
    if event.where is None or event["hook"] or event["inside"] or event["op"] not in OPS:
        return None
    return event.where.file, event.where.line, str(event["op"])


def _apart(recording: Recording) -> set[Place]:
    """Statements that send in each turn of their loop what this turn has made."""
    return {place for e in recording.of("coll_site") if e["apart"] and (place := _place(e)) is not None}


def _loads(recording: Recording) -> list[Load]:
    apart = _apart(recording)
    gradients: dict[Place, dict[int, list[Event]]] = {}
    others: dict[Place, dict[int, list[Event]]] = {}
    for event in recording.of("coll"):
        if (place := _place(event)) is None:
            continue
        if event["grad"]:
            if event["op"] == "all_reduce":
                gradients.setdefault(place, {}).setdefault(event.step, []).append(event)
        elif place in apart and not event["replicated"] and not event["graphed"]:
            others.setdefault(place, {}).setdefault(event.step, []).append(event)
    found = [_load(recording, "gradients are all-reduced", SMALL, steps) for steps in gradients.values()]
    found += [_load(recording, f"tensors are {OPS[place[2]]}", TINY, steps) for place, steps in others.items() if _is_every_step(steps)]
    return [one for one in found if one is not None]


def _is_every_step(steps: dict[int, list[Event]]) -> bool:
    """What comes now and then, such as an evaluation, takes its share of a few steps, not of the time."""
    return len(steps) == max(steps) - min(steps) + 1


def _load(recording: Recording, what: str, most: int, steps: dict[int, list[Event]]) -> Load | None:
    whole = [s for s in sorted(steps)[:-1] if s in recording.step_index]  # the last one may have met the end of what is told
    nums = [len(steps[s]) for s in whole]
    rows = [recording.row(recording.step_index[s]) for s in whole]
    if len(whole) < MIN_STEPS or min(nums) < WEAK[0] or sum(r.wall_s for r in rows) < MIN_S:
        return None
    first = steps[whole[0]]
    sizes = [number(e["numel"]) for e in first]
    if statistics.fmean(sizes) > most or first[0].where is None:
        return None
    apart = [_apart_s(steps[s]) for s in whole]
    inside = [r.coll_s / max(1, r.num_coll) for r in rows]  # without what the script does in between
    each = [min(pair) for pair in zip(apart, inside, strict=True)]
    # step by step, for what makes a busy host's step long makes its collectives long
    shares = [min(1.0, n * each_s / r.wall_s) for n, each_s, r in zip(nums, each, rows, strict=True) if r.wall_s > 0]
    step_s, share = statistics.median(r.wall_s for r in rows), statistics.median(shares or [0.0])
    return Load(first[0].where, what, int(statistics.median(nums)), sum(sizes), statistics.median(each), step_s, share)


def _apart_s(calls: list[Event]) -> float:
    """From call to call, without the longest time: in that the rank waits for a slower one. What they take together counts, not the quickest half."""
    apart = [(b.t_ns - a.t_ns) / 1e9 for a, b in itertools.pairwise(calls)]
    return (sum(apart) - max(apart)) / (len(apart) - 1)
