"""Ranks that leave out optimizer steps whose backward all ranks ran: every collective has its partner, only the update is missing."""

from __future__ import annotations

from dataclasses import dataclass

from harness.record import Run


@dataclass(frozen=True)
class LeftOut:
    ranks: tuple[int, ...]  # that took fewer steps than another
    steps: tuple[int, ...]  # optimizer steps, a rank each
    backwards: tuple[int, ...]  # up to the last step, a rank each
    first: int  # the first step before which the ranks had run different numbers of backwards


def of(run: Run) -> LeftOut | None:
    """None where ranks took as many steps, or ran other numbers of backwards (a skipped batch, local epochs), or a GradScaler decides (OPT109)."""
    if len(run.present) < 2 or len(run.present) != run.world_size or not run.finished:
        return None
    steps = tuple(r.num_steps for r in run.present)
    if len(set(steps)) == 1 or any(r.num_rows != r.num_steps for r in run.present) or any(any(r.column("scale")) for r in run.present):
        return None
    if any(2 * sum(a > 0 or b > 0 for a, b in zip(r.column("num_reduce"), r.column("num_coll"), strict=True)) <= r.num_rows for r in run.present):
        return None  # they do not train together, or meet now and then
    columns = [[int(n) for n in r.column("num_backward")] for r in run.present]
    totals = tuple(sum(c) for c in columns)
    usual = min(max(c, default=0) for c in columns)  # backwards that a step takes on the rank that leaves out least
    if not usual or max(totals) - min(totals) > usual * (max(steps) - min(steps) > 0):
        return None
    apart = [i for i, row in enumerate(zip(*columns, strict=False)) if len(set(row)) > 1]
    if not apart:
        return None
    behind = tuple(run.rank_ids[i] for i, n in enumerate(steps) if n < max(steps))
    return LeftOut(behind, steps, totals, apart[0])
