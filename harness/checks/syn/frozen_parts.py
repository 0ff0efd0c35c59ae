"""Frozen parts of a wrapped model that began equal on all ranks and part while it is trained: what the ranks told of them (probe/sensors/frozenparts.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.model import Where
from harness.record import Event, Run, number, texts


@dataclass(frozen=True)
class Parted:
    """Of one wrap."""

    step: int  # the first look that found them apart
    ranks: tuple[int, ...]  # whose parameters moved by more than rounding
    kept: bool  # whether some rank's did not
    names: tuple[str, ...]
    num: int  # of how many
    where: Where | None


def parted(run: Run) -> Parted | None:
    """None where they came together again, where they moved by rounding alone, and where no forward in training uses what moved."""
    for wrap in run.present[0].of("wrap") if run.present else ():
        if number(wrap["group_size"], run.world_size) != run.world_size or len(run.present) < run.world_size:
            continue
        columns = [[e for e in r.of("frozen_state") if e["index"] == wrap["index"]] for r in run.present]
        if not all(columns) or len({(c[0].step, c[0]["digest"]) for c in columns}) > 1:
            continue  # not begun alike
        used = [{n for e in r.of("frozen_used") if e["index"] == wrap["index"] for n in texts(e["names"])} for r in run.present]
        last = [_at(c, c[-1].step) for c in columns]
        names = sorted({n for u, now in zip(used, last, strict=True) for n in u & now.keys()})
        since = {n: s for n in names if (s := _from(columns, n)) is not None}
        if since:
            moved = tuple(rank for rank, now in enumerate(last) if since.keys() & now.keys())
            where = next((e.where for rank in moved for e in columns[rank] if e.where is not None), wrap.where)
            return Parted(min(since.values()), moved, len(moved) < len(columns), tuple(since), number(columns[0][0]["num"]), where)
    return None


def _from(columns: Sequence[Sequence[Event]], name: str) -> int | None:
    """The step from which on the ranks' values differ, to the end; None where they do not, or were alike again in between."""
    steps = sorted({e.step for c in columns for e in c})
    apart = [len({_at(c, s).get(name) for c in columns}) > 1 for s in steps]
    if not apart[-1] or False in apart[apart.index(True) :]:
        return None
    return steps[apart.index(True)]


def _at(column: Sequence[Event], step: int) -> dict[str, int]:
    moved = [e["moved"] for e in column if e.step <= step][-1]
    return {str(name): number(digest) for name, digest in moved.items()} if isinstance(moved, dict) else {}
