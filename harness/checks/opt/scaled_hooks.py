"""Hooks on parameters that cut gradients to a limit while a GradScaler's factor is on them. Read from what each hook was given and made of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from harness.model import Where
from harness.record import Event, Recording, Run

MIN_STEPS = 4
LEFT = 0.5  # of the norm


@dataclass(frozen=True)
class Cutting:
    """The hooks that one statement registered, as the first rank saw them."""

    where: Where | None
    limit: float
    scale: float
    num: int  # steps that took more than half
    of: int
    ranks: list[int]


def of(run: Run) -> Cutting | None:
    own = [(rank, found) for rank, r in enumerate(run.ranks) if r is not None and (found := _of_rank(r)) is not None]
    if not own:
        return None
    one = own[0][1]
    return Cutting(one.where, one.limit, one.scale, one.num, one.of, [rank for rank, _ in own])


def _of_rank(recording: Recording) -> Cutting | None:
    """Of the first statement whose hooks do so."""
    places: dict[tuple[str, int], dict[object, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in (*recording.of("leaf_hook"), *recording.of("accumulated_hook")):
        if event.where and _value(event["scale"]) > 1 and math.isfinite(_value(event["before"])):
            places[event.where.file, event.where.line][repr(event["key"])].append(event)
    return next((found for hooks in places.values() if (found := _of_place(list(hooks.values()))) is not None), None)


def _of_place(hooks: Sequence[list[Event]]) -> Cutting | None:
    limited = [(limit, events) for events in hooks if (limit := _limit(events)) is not None]
    taken = [events for _, events in limited if not _is_known(events)]
    if not taken:
        return None
    given, left = defaultdict[int, float](float), defaultdict[int, float](float)
    for event in (e for events in taken for e in events):
        given[event.step] += _square(event["before"])
        left[event.step] += _square(event["after"])
    num = sum(left[s] < LEFT**2 * given[s] for s in given)
    if num < MIN_STEPS or 3 * num < 2 * len(given):
        return None
    first = taken[0][0]
    return Cutting(first.where, limited[0][0], _value(first["scale"]), num, len(given), [])


def _is_known(events: Sequence[Event]) -> bool:
    """The limit may be multiplied by the factor: a factor that changes, and a limit that does not, says that it is not."""
    return bool(events[0]["known"]) and len({e["scale"] for e in events}) == 1


def _square(told: object) -> float:
    return _value(told) * _value(told)  # ** would raise where it overflows


def _value(told: object) -> float:
    return float(told) if isinstance(told, (int, float)) else 0.0


def _limit(events: Sequence[Event]) -> float | None:
    """The one number that entries are cut to, or the one norm that longer gradients are brought to by a factor that differs from step to step."""
    changed = [e for e in events if abs(_value(e["after"]) - _value(e["before"])) > 1e-4 * _value(e["before"]) > 0]
    if len(changed) < MIN_STEPS:
        return None
    bounds = [_value(e["bound"]) for e in changed]
    if min(bounds) > 0:
        return bounds[0] if max(bounds) - min(bounds) <= 1e-6 * max(bounds) else None
    norms, factors = [_value(e["after"]) for e in changed], [_value(e["after"]) / _value(e["before"]) for e in changed]
    one = all(e["along"] for e in changed) and max(factors) < 1 and max(norms) - min(norms) <= 1e-3 * min(norms)
    return norms[0] if one and max(factors) > min(factors) * (1 + 1e-2) else None
