"""Times of the steps of a run, and whether the machine lets them be judged."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence

from harness.checks.base import Inconclusive
from harness.record import Recording, Run

WARM_UP_STEPS = 3  # imports, first allocations, compiles


def column(recording: Recording, name: str) -> list[float]:
    """One number of every row after the warm-up."""
    found = recording.column(name)[WARM_UP_STEPS:]
    return found.tolist() if found.typecode in "fd" else [float(v) for v in found]


def num_workers(run: Run) -> int:
    """Loader workers of all ranks on this host."""
    return sum(max((int(e["num_workers"] or 0) for e in r.of("loader")), default=0) for r in run.present)


def require_cores(run: Run) -> None:
    """Times of ranks that take turns on a core say nothing about the script."""
    wanted = len(run.present) + num_workers(run)
    if wanted > run.num_cores * max(1, run.plan.nodes):
        raise Inconclusive(f"{len(run.present)} ranks and {num_workers(run)} loader workers on {run.num_cores} cores take turns")


def busy(run: Run) -> float:
    """The host's load where it is well above its cores, so that somebody else works on it; else 0."""
    loads = [e["load"] for r in run.present for e in r.of("profile") if isinstance(e["load"], (int, float))]
    return max(loads) if loads and max(loads) > 1.25 * run.num_cores + 0.5 else 0.0


def paired(differences: Sequence[float]) -> tuple[float, float]:
    """(median of differences, its uncertainty from their scatter)."""
    center = median(differences)
    spread = median([abs(d - center) for d in differences])
    return center, 1.25 * 1.4826 * spread / max(1, len(differences)) ** 0.5


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def median_without(value: float, ordered: Sequence[float]) -> float:
    """Median of sorted values that hold `value`, without it: one for each of 1,024 ranks costs a search, not a sort."""
    left, at = len(ordered) - 1, bisect.bisect_left(ordered, value)
    if left < 1:
        return 0.0

    def rest(place: int) -> float:
        return ordered[place if place < at else place + 1]

    return rest(left // 2) if left % 2 else (rest(left // 2 - 1) + rest(left // 2)) / 2
