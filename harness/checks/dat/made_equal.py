"""Random states that differ from rank to rank until the script puts one and the same back on all ranks, as a checkpoint of rank 0 does.

Judged by what is drawn from there on: a state that is lent for a draw that all ranks have to make alike is given back before the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.checks.dat.noise import Source
from harness.checks.dat.passes import MAX_COMPARED
from harness.record import Event, Recording, Run, number

MIN_STEPS = 3  # drawn differently before, alike after
NEVER = 1 << 60
MAX_LATER = 16  # states compared


@dataclass(frozen=True)
class Restored:
    """One state on all ranks, where each had another one: before step `step`, and until the generator is seeded or put back once more."""

    event: Event
    step: int
    until: int


def restored(run: Run) -> Iterator[Restored]:
    """In the middle of a training: at one statement, after as many steps, on all ranks."""
    told = [r.of("rng_restored") for r in run.present[:MAX_COMPARED]]
    if not told or len({len(t) for t in told}) > 1:
        return
    for events in zip(*told, strict=True):
        first = events[0]
        one_place = len({repr((e["what"], e.where, e.step)) for e in events}) == 1
        equal = len({number(e["state"]) for e in events}) == 1 and bool(first["state"])
        if len(events) > 1 and one_place and equal and len({number(e["before"]) for e in events}) == len(events) and first.step >= MIN_STEPS:
            yield Restored(first, first.step, min(_until(r, e) for r, e in zip(run.present, events, strict=False)))


def _until(recording: Recording, at: Event) -> int:
    again = [e.step for kind in ("seed", "rng_restored") for e in recording.of(kind) if e["what"] == at["what"] and e.t_ns > at.t_ns]
    return min(again, default=NEVER)


def draws(source: Source, at: Restored) -> int:
    """Steps behind the restoring at which all ranks drew alike; 0 unless they did so at all of them, and at hardly any before."""
    alike = {step: len({repr((e["digest"], e["num"])) for e in events}) == 1 for step, events in source.steps.items()}
    earlier, later = [a for s, a in alike.items() if s < at.step], [a for s, a in alike.items() if at.step < s < at.until]
    if source.first["generator"] or len(earlier) < MIN_STEPS or sum(earlier) > 0.1 * len(earlier):
        return 0
    values = {repr(events[0]["digest"]) for step, events in source.steps.items() if at.step < step < at.until}
    return len(later) if len(later) >= MIN_STEPS and all(later) and len(values) > 1 else 0


def states(run: Run, at: Restored) -> int:
    """Steps behind the restoring at which torch's generators are in equal states that move; 0 unless so at all of them, and at none before."""
    earlier, later = 0, []
    for step in run.steps():
        if step.complete and step.index < at.until and step.index != at.step:  # the restoring may lie within that one
            equal, row = step.same("rng"), step.rows[0]
            if row is None or not row.rng:
                continue
            if equal != (step.index > at.step):
                return 0
            earlier += step.index < at.step
            later += [row.rng] if step.index > at.step else []
            if len(later) == MAX_LATER:
                break
    return len(later) if earlier >= MIN_STEPS and len(later) >= MIN_STEPS and len(set(later)) == len(later) else 0
