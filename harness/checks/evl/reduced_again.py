"""EVL109 totals-reduced-again: what a reduction gave is put into the next one of the same statement.

What it does
    Compares what goes into a sum over the ranks with what the sum before, at the same statement, gave: time after time every rank
    puts in at least what all ranks got out, element by element, and the old sum is nearly all of it. Meters of one statement that are
    reduced in turn are told apart.

Why it is bad
    The batches before are counted again by each rank, at every batch: the totals grow by a factor of world_size each time. What is divided in the
    end looks like a mean, but the first batches weigh many thousand times the last one.

Wrong
    for x, y in loader:
        counts += count(model(x), y)
        dist.all_reduce(counts)                # counts already holds the sum over the ranks

Right
    for x, y in loader:
        counts += count(model(x), y)
    dist.all_reduce(counts)                    # once, behind the loop; or reduce a copy: dist.all_reduce(shown := counts.clone())

Known limits
    Sums of numbers that are not negative (counts, losses), at least three reductions in a row; six where it is one number alone, no count, that
    comes in a new tensor each time, for a number that doubles of itself is nothing unheard of. Of tensors with more than eight elements only the
    sum over the elements is looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes
from harness.checks.evl import reductions
from harness.checks.evl.reductions import Reduction
from harness.model import Finding, Severity
from harness.record import Run

MIN_PAIRS = 3  # in all, two and more in a row: a local counter that is reduced at even distances passes once, and less than doubles after that
MIN_PAIRS_OF_ONE = 6
MAX_PERIOD = 8  # meters that are reduced in turn by one statement
SHARE = 0.8  # of what goes in at the end of a row: 14 parts in 15 where two ranks reduce counts of equal batches
ROUNDING = 1e-5


class TotalsReducedAgain(Check):
    code = "EVL109"
    name = "totals-reduced-again"
    severity = Severity.WARNING
    explains = ("EVL107", "EVL108")

    def end(self, run: Run) -> Iterable[Finding]:
        passes.several_ranks(run)
        sums = [r for r in reductions.aligned(run, totals=True) if r.kind in ("sum", "gather")]
        if not sums:
            raise NotApplicable("no small sums over the ranks")
        sites: dict[tuple[str, int, str], list[Reduction]] = {}
        for one in sums:
            if one.where is not None:
                sites.setdefault((one.where.file, one.where.line, one.events[0].kind), []).append(one)
        for series in sites.values():
            row = _longest(series)
            if row:
                yield self._found(run, row)

    def _found(self, run: Run, row: Sequence[Reduction]) -> Finding:
        last, before = row[-1], row[-2]
        ranks = reductions.holders(last)
        rank, i = ranks[0], max(range(len(last.after)), key=lambda e: before.got(ranks[0])[e])
        steps = [one.got(rank)[i] for one in row]
        return self.finding(
            f"what this sum over the ranks gives goes into the next one and is summed again: {len(row)} in a row",
            where=last.where,
            ranks=ranks,
            notes=[
                "the sum grows: " + ", ".join(f"{v:g}" for v in steps[:6]),
                f"rank {rank} puts in {last.before[rank][i]:g}, of which {before.got(rank)[i]:g} is what the reduction before gave",
            ],
            help="reduce once, behind the loop; or reduce a copy and keep the rank's own totals (`shown = totals.clone()`)",
            evidence={"sums": steps[:16], "reductions": len(row)},
        )


def _longest(series: Sequence[Reduction]) -> list[Reduction]:
    """The longest row in which each reduction holds the one before, of reductions that are `period` calls apart; none where there are few."""
    for period in range(1, MAX_PERIOD + 1):
        for first in range(period):
            rows = [r for r in _rows(series[first::period]) if len(r) > 2 and _even(r) and _mostly_old(r) and _told_apart(r)]
            if sum(len(r) - 1 for r in rows) >= MIN_PAIRS:
                return max(rows, key=len)
    return []


def _rows(series: Sequence[Reduction]) -> list[list[Reduction]]:
    found: list[list[Reduction]] = []
    for one in series:
        if found and _holds(found[-1][-1], one):
            found[-1].append(one)
        else:
            found.append([one])
    return found


def _holds(old: Reduction, new: Reduction) -> bool:
    """On each rank that got the old sum, what goes in now is the old sum and something more; all parts of a sum are there."""
    ranks = reductions.holders(old)
    if not ranks or len(old.after) != len(new.after) or min(map(min, old.before)) < 0 or old.low < 0:
        return False
    if sum(any(b) for b in old.before) < 2:
        return False  # one rank gave all of it: a value that is sent to the others
    for rank in ranks:
        pairs = list(zip(old.got(rank), new.before[rank], strict=True))
        if not any(a > 0 for a, _ in pairs) or any(b < a * (1 - ROUNDING) for a, b in pairs):
            return False
        if not any(b > a * (1 + ROUNDING) for a, b in pairs):
            return False  # the same sum over other groups of ranks, or nothing new
    return True


def _told_apart(row: Sequence[Reduction]) -> bool:
    """The old sum itself goes in, several numbers agree, it is a count, or it agrees too often for a quantity that grows by nature."""
    same = all(e["same"] is not False for one in row[1:] for e in one.events)
    counts = all(v.is_integer() for one in row for own in one.before for v in own)
    return same or counts or len(row[0].after) > 1 or len(row) > MIN_PAIRS_OF_ONE


def _even(row: Sequence[Reduction]) -> bool:
    """Not at ever larger distances in steps: a local counter that is told at steps 1, 10, 100 grows as fast."""
    gaps = [b.step(0) - a.step(0) for a, b in itertools.pairwise(row)]
    return not all(b > a for a, b in itertools.pairwise(gaps))


def _mostly_old(row: Sequence[Reduction]) -> bool:
    """What goes in at the end is nearly the sum before."""
    old, new = row[-2], row[-1]
    return all(sum(old.got(rank)) >= SHARE * sum(new.before[rank]) for rank in reductions.holders(old))
