"""Small reductions as the checks see them: the n-th call at one statement, on all ranks, with the values that went in and came out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.model import Where
from harness.record import Event, Run, number, where_of


@dataclass(frozen=True)
class Reduction:
    """One reduction: `before[rank][i]` and `after[i]` (as rank 0 got it)."""

    events: Sequence[Event]
    before: tuple[tuple[float, ...], ...]
    after: tuple[float, ...]
    low: float = 0.0  # smallest element on any rank, where only the sum over the elements is known

    @property
    def where(self) -> Where | None:
        return self.events[0].where

    @property
    def kind(self) -> str:
        return "gather" if self.events[0].kind == "gathered" else str(self.events[0]["reduce"])

    def got(self, rank: int) -> tuple[float, ...]:
        """What this rank has after the call; `reduce` leaves all ranks but one with something else."""
        return self.after if self.kind == "gather" else _values(self.events[rank]["after"])

    def at_t(self, rank: int) -> int:
        return number(self.events[rank]["at_t"])

    def step(self, rank: int) -> int:
        return number(self.events[rank]["at"])


def aligned(run: Run, *, totals: bool = False) -> list[Reduction]:
    """Reductions, and gathers of a few numbers, whose sum over the ranks stands for the result; `totals`: larger tensors by their sum too."""
    read = f"_reductions{totals:d}"
    known = run.__dict__.get(read)
    if isinstance(known, list):
        return known
    kinds = ("reduced", "gathered", "reduced_total") if totals else ("reduced", "gathered")
    tables: dict[tuple[Any, ...], dict[int, Event]] = {}
    for rank, recording in enumerate(run.ranks):
        counts: dict[tuple[str, int, str], int] = {}
        for event in [e for kind in kinds for e in recording.of(kind)] if recording is not None else []:
            at = event.where
            key = (at.file.rpartition("/")[-1], at.line, event.kind) if at else ("", 0, event.kind)
            nth = counts[key] = counts.get(key, -1) + 1
            tables.setdefault((*key, nth), {})[rank] = event
    found = [_together([table[r] for r in sorted(table)]) for table in tables.values() if len(table) == run.world_size > 1]
    run.__dict__[read] = known = sorted((r for r in found if r is not None), key=lambda r: r.at_t(0))
    return known


def _together(events: list[Event]) -> Reduction | None:
    gathered = events[0].kind == "gathered"
    before = tuple(_values(e["values" if gathered else "before"]) for e in events)
    if not before[0] or len({len(b) for b in before}) != 1:
        return None
    after = tuple(sum(b[i] for b in before) for i in range(len(before[0]))) if gathered else _values(events[0]["after"])
    lows = [float(e["low"]) for e in events if isinstance(e["low"], (int, float))]
    return Reduction(events, before, after, min(lows, default=0.0)) if len(after) == len(before[0]) else None


def divided_at(run: Run, where: Where | None) -> Where | None:
    """The division right behind the reduction, which lacks a factor; else the reduction."""
    for _, event in run.events("reduced"):
        if where is not None and event.where == where:
            behind = where_of(event["result"])
            return behind if behind is not None and behind.line - where.line <= 3 else where
    return where


def holders(one: Reduction) -> tuple[int, ...]:
    """The ranks that have the result: all, or of a reduction to one rank those that hold the sum of what went in."""
    op = one.events[0]["op"]
    if op in ("gather", "gather_object"):
        return (0,)
    if op != "reduce":
        return tuple(range(len(one.before)))
    sums = [sum(column) for column in zip(*one.before, strict=True)]
    return tuple(r for r in range(len(one.before)) if _near(one.got(r), sums))


def _near(values: Sequence[float], wanted: Sequence[float]) -> bool:
    return len(values) == len(wanted) and all(abs(v - w) <= 1e-4 * max(abs(v), abs(w)) for v, w in zip(values, wanted, strict=True))


def _values(listed: Any) -> tuple[float, ...]:
    return tuple(float(v) for v in listed) if isinstance(listed, list) and all(isinstance(v, (int, float)) for v in listed) else ()


def mean_like(values: Sequence[float]) -> bool:
    """Finite and no counts: a count is whole on every rank."""
    return all(math.isfinite(v) for v in values) and any(abs(v - round(v)) > 1e-6 for v in values)
