"""Whether a number stands in its line beside the mean over all ranks of the same measurement: `loss: 0.2790 (0.2714)`, a rank's own median and what
was synchronised. Shared by checks of what one rank reports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from harness.checks.evl import measured, reductions
from harness.checks.evl.measured import Measured
from harness.checks.evl.reports import Report
from harness.record import Run

SAME = re.compile(r"^(?:[^A-Za-z]|\b(?:avg|average|mean|median|global|overall|all)\b)*$", re.IGNORECASE)  # no name of another metric
MAX_ELEMENTS, MAX_REDUCTIONS = 3, 16  # of what is reduced: a sum and a count


def whole(run: Run, report: Report, place: int, one: Measured, groups: Sequence[Sequence[Measured]]) -> bool | None:
    """None where the number beside it may as well be the rank's own mean."""
    values, told = report.values(), False
    for other in (place - 1, place + 1):
        if not 0 <= other < len(values) or values[other].digits < 3 or not SAME.match(report.between(min(place, other))):
            continue
        for own, everybody in _means(run, one, groups):
            for scale in (1, 100):
                if values[other].is_near(scale * everybody):
                    if not values[other].is_near(scale * own):
                        return True
                    told = True
    return None if told else False


def _means(run: Run, one: Measured, groups: Sequence[Sequence[Measured]]) -> Iterator[tuple[float, float]]:
    """(of this rank, of all) as measured, and as the quotients of what the ranks added up at that step."""
    for group in groups:
        if group[0].at == one.at:
            mine = next((m.means for m in group if m.rank == one.rank), ())
            yield from zip(mine, measured.overall(group), strict=False)
    sums = [r for r in reductions.aligned(run) if r.kind == "sum" and r.step(one.rank) == one.at and len(r.after) <= MAX_ELEMENTS]
    for reduced in sums[-MAX_REDUCTIONS:]:
        mine, everybody = reduced.before[one.rank], reduced.after
        for i, total in enumerate(everybody):
            yield mine[i], total / run.world_size
            yield from ((mine[i] / mine[j], total / num) for j, num in enumerate(everybody) if j != i and num and mine[j])
