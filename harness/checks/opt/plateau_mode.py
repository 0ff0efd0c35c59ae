"""OPT135 plateau-mode: ReduceLROnPlateau takes the improvement of its metric for a plateau

What it does
    Looks at the mode of a schedule that follows a metric, and at what it is given: under mode "min", which is the default, a value that
    the script calls an accuracy (F1, AUC, recall, IoU, ...) and that rises; under mode "max" one that it calls a loss or an error, and that falls.
    An error where the learning rate has been cut so, a warning before.

Why it is bad
    The better the model gets, the longer the schedule sees no improvement: the learning rate is cut while training goes well, and soon
    nothing moves any more.

Wrong
    scheduler = ReduceLROnPlateau(optimizer)              # mode="min"
    scheduler.step(val_accuracy)

Right
    scheduler = ReduceLROnPlateau(optimizer, mode="max")
    scheduler.step(val_accuracy)

Known limits
    Needs three values and a name that says which way is better: a `score` or a `metric` is not judged, nor is what is negated or taken from 1.
    A validation loss that rises under mode "min" is healthy and silent: that is what the schedule is for.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, where_of

MIN_VALUES, MOST = 3, 2 / 3  # values seen, and share of the later ones that are better than the first
WRONG = {"min": "higher", "max": "lower"}
PERCENT = 100.0


class PlateauMode(Check):
    code = "OPT135"
    name = "plateau-mode"
    severity = Severity.ERROR
    explains = ("OPT113",)

    def end(self, run: Run) -> Iterable[Finding]:
        followed = [(rank, own) for rank, r in enumerate(run.ranks) if r is not None for own in _followed(r)]
        if not followed:
            raise NotApplicable("no schedule follows a metric whose name says which way is better")
        hits = [(rank, own) for rank, own in followed if {(e["mode"], e["better"]) for e in own} <= set(WRONG.items()) and _improves(own)]
        if not hits:
            return
        own = hits[0][1]
        mode, values = own[0]["mode"], [e["metric"] for e in own]
        right, moves = ("max", "rises") if mode == "min" else ("min", "falls")
        cut = _cut(own)
        shown = ", ".join(f"{v:.4g}" for v in values[:8])
        yield self.finding(
            f'the {own[0]["kind"]} is in mode "{mode}", and what it follows is better when it is {WRONG[mode]}: it {moves}, '
            + ("and the learning rate is cut for it" if cut else "which counts as no improvement"),
            severity=None if cut else Severity.WARNING,
            where=where_of(own[0]["made"]) or own[0].where,
            ranks=sorted({rank for rank, _ in hits}),
            notes=[f"it is given {shown}", *([f"lr {own[0]['lr']:g} at first, {own[-1]['lr']:g} at the end"] if cut else [])],
            help=f'ReduceLROnPlateau(optimizer, mode="{right}")',
        )


def _followed(recording: Recording) -> list[list[Event]]:
    """The steps of each schedule that is given a metric of known direction."""
    tables: dict[object, list[Event]] = {}
    for event in recording.of("scheduler"):
        if event["mode"] and event["better"] and isinstance(event["metric"], (int, float)):
            tables.setdefault(event["id"], []).append(event)
    return list(tables.values())


def _improves(own: list[Event]) -> bool:
    values = [float(e["metric"]) for e in own]
    if len(values) < MIN_VALUES:
        return False
    first, later = values[0], values[1:]
    if own[0]["better"] == "higher":
        inside = all(0 <= v <= PERCENT for v in values)  # a share or a percentage; `acc` is also what accumulates
        return inside and later[-1] > first and sum(v > first for v in later) >= MOST * len(later)
    return later[-1] < first and all(v >= 0 for v in values) and sum(v < first for v in later) >= MOST * len(later)


def _cut(own: list[Event]) -> bool:
    rates = [e["lr"] for e in own if isinstance(e["lr"], (int, float))]
    return len(rates) == len(own) and rates[-1] < rates[0]
