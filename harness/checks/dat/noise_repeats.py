"""DAT118 noise-repeats: the generator is seeded with one value again and again, and training draws the same numbers each time

What it does
    Where a global generator is seeded with the same value at least twice while one optimizer goes on, compares what a statement drew behind
    one seeding with what it drew behind the next, step by step.

Why it is bad
    Dropout, noise, time steps and augmentation of every epoch are those of the first one: the model sees N epochs of the same.

Wrong
    for epoch in range(epochs):
        seed_everything(args.seed + rank)             # "so that an epoch can be repeated"

Right
        seed_everything(args.seed + rank + 1000 * epoch)

Known limits
    Advice where no data loader feeds the training: the draws may be the data set itself, made anew in each epoch. The first 64 steps. Draws
    of the script's own code, and of its data set in the training process; masks that a Dropout layer draws follow the same seed and are not
    compared. A script that seeds anew for another trial has another optimizer there, and is silent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity, Where
from harness.record import Event, Recording, Run, number

MIN_STEPS = 3  # equal behind both seedings


class NoiseRepeats(Check):
    code = "DAT118"
    name = "noise-repeats"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(r.of("seed") and r.num_rows for r in run.present):
            raise NotApplicable("no global generator is seeded by a script that trains")
        again = {rank: _again(r) for rank, r in enumerate(run.ranks) if r is not None}
        for rank, recording in enumerate(run.ranks):
            for seeds in again.get(rank) or ():
                if recording is not None and (hit := _repeats(recording, seeds)) is not None:
                    place, num = hit
                    yield self.finding(
                        f"the generator is seeded with {seeds[0]['value']} {len(seeds)} times while training goes on: "
                        f"{place.place} draws the same values each time",
                        where=seeds[-1].where,
                        severity=None if any(e["backwards"] for e in recording.of("pass")) else Severity.ADVICE,
                        ranks=[r for r, found in again.items() if found],
                        notes=[f"{num} steps behind one seeding drew what the steps behind the next one did"],
                        help="seed once at the start, or let the epoch go into the seed",
                    )
                    return


def _again(recording: Recording) -> list[list[Event]]:
    """Seedings of one kind with one value, two of them and more with steps behind each and one optimizer before and after."""
    opts = dict(zip(recording.column("step"), recording.column("opt"), strict=True))
    found: dict[tuple[object, object, float], dict[int, Event]] = {}
    for event in recording.of("seed"):
        if event["value"] is not None and event.step in opts:
            found.setdefault((event["what"], event["value"], opts[event.step]), {})[event.step] = event
    return [[event for _, event in sorted(seeds.items())] for seeds in found.values() if len(seeds) > 1]


def _repeats(recording: Recording, seeds: list[Event]) -> tuple[Where, int] | None:
    """(statement, equal steps) that draws the same behind each seeding, other values within."""
    drawn: dict[tuple[str, int, str], dict[int, tuple[int, Event]]] = {}
    for event in recording.of("draw"):
        if event.where is not None and event["grad"]:
            key = (event.where.file, event.where.line, str(event["fn"]))
            drawn.setdefault(key, {}).setdefault(number(event["at"]), (number(event["digest"]), event))
    for at in drawn.values():
        where = next(iter(at.values()))[1].where
        rounds = [_behind(at, one.step, other.step) for one, other in pairwise(seeds)]
        num = sum(len(r) for r in rounds)
        equal = all(a == b for r in rounds for a, b in r)
        if where is not None and equal and num >= MIN_STEPS and len({value for value, _ in at.values()}) >= MIN_STEPS:
            return where, num
    return None


def _behind(at: Mapping[int, tuple[int, Event]], first: int, second: int) -> list[tuple[int, int]]:
    """Pairs of digests drawn equally far behind two seedings."""
    pairs = []
    for offset in range(second - first):
        one, other = at.get(first + offset), at.get(second + offset)
        if one is not None and other is not None:  # the first 64 steps are told
            pairs.append((one[0], other[0]))
    return pairs
