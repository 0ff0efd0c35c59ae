"""Small reductions as the checks see them: the n-th call at one statement, on all ranks, with the values that went in and came out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.checks.dat.passes import number
from harness.model import Where
from harness.record import Event, Run


@dataclass(frozen=True)
class Reduction:
    """One reduction: `before[rank][i]` and `after[i]` (as rank 0 got it)."""

    events: Sequence[Event]
    before: tuple[tuple[float, ...], ...]
    after: tuple[float, ...]

    @property
    def where(self) -> Where | None:
        return self.events[0].where

    @property
    def kind(self) -> str:
        return str(self.events[0]["reduce"])

    def at_t(self, rank: int) -> int:
        return number(self.events[rank]["at_t"])

    def step(self, rank: int) -> int:
        return number(self.events[rank]["at"])


def aligned(run: Run) -> list[Reduction]:
    tables: dict[tuple[Any, ...], dict[int, Event]] = {}
    for rank, recording in enumerate(run.ranks):
        counts: dict[tuple[str, int], int] = {}
        for event in recording.of("reduced") if recording is not None else []:
            at = event.where
            key = (at.file.rpartition("/")[-1], at.line) if at else ("", 0)
            nth = counts[key] = counts.get(key, -1) + 1
            tables.setdefault((*key, nth), {})[rank] = event
    found = []
    for table in tables.values():
        if len(table) == run.world_size > 1:
            events = [table[r] for r in sorted(table)]
            before = tuple(_values(e["before"]) for e in events)
            after = _values(events[0]["after"])
            if after and len({len(b) for b in before} | {len(after)}) == 1:
                found.append(Reduction(events, before, after))
    return sorted(found, key=lambda r: r.at_t(0))


def _values(listed: Any) -> tuple[float, ...]:
    return tuple(float(v) for v in listed) if isinstance(listed, list) and all(isinstance(v, (int, float)) for v in listed) else ()


def mean_like(values: Sequence[float]) -> bool:
    """Finite and no counts: a count is whole on every rank."""
    return all(math.isfinite(v) for v in values) and any(abs(v - round(v)) > 1e-6 for v in values)
