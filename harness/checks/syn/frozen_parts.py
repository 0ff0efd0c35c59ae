"""Frozen parts of a wrapped model that began equal on all ranks and part while it is trained: what the ranks told of them (probe/sensors/frozenparts.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.model import Where
from harness.record import Event, Run, number


@dataclass(frozen=True)
class Parted:
    """Of one wrap."""

    step: int  # the first look that found them apart
    ranks: tuple[int, ...]  # whose parameters moved by more than rounding
    kept: bool  # whether some rank's never moved
    event: Event  # the first that told it
    wrap: Where | None


def parted(run: Run) -> Parted | None:
    """None where they came together again, where they moved by rounding alone, and where no forward in training uses what moved."""
    for wrap in run.present[0].of("wrap") if run.present else ():
        if number(wrap["group_size"], run.world_size) != run.world_size or len(run.present) < run.world_size:
            continue
        columns = [[e for e in r.of("frozen_state") if e["index"] == wrap["index"]] for r in run.present]
        if (step := _from(columns)) is None:
            continue
        used = {rank for rank, r in enumerate(run.present) if any(e["index"] == wrap["index"] for e in r.of("frozen_used"))}
        moved = [rank for rank, column in enumerate(columns) if column[-1]["moved"]]
        if used & set(moved):
            event = next(e for rank in moved for e in columns[rank] if e["moved"])
            return Parted(step, tuple(moved), any(len(c) == 1 for c in columns), event, wrap.where)
    return None


def _from(columns: Sequence[Sequence[Event]]) -> int | None:
    """The step from which on they differ, to the end; None where they do not, did not begin alike, or were alike in between."""
    if not all(columns) or len({(c[0].step, c[0]["digest"]) for c in columns}) > 1:
        return None
    steps = sorted({e.step for c in columns for e in c})
    apart = [len({_at(c, s) for c in columns}) > 1 for s in steps]
    if not apart[-1] or False in apart[apart.index(True) :]:
        return None
    return steps[apart.index(True)]


def _at(column: Sequence[Event], step: int) -> int:
    return number([e["digest"] for e in column if e.step <= step][-1])
