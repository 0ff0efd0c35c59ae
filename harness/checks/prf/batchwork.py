"""Which rank's batches are larger than the others' for good: work that no clock and no load of the host has a part in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.checks.prf import pace
from harness.model import Where
from harness.record import Event, Recording, number

RATIO = 1.3
MIN_BATCHES = 20  # of each rank


@dataclass(frozen=True)
class Heavier:
    """The rank with the larger batches, and the numbers in one of them, in the mean."""

    rank: int
    where: Where | None  # where they are drawn
    own: float
    others: float

    @property
    def times(self) -> float:
        return self.own / self.others


def heavier(trained: Mapping[int, Recording]) -> Heavier | None:
    """In every pass that is trained on; None where the ranks' passes are not as many, or short."""
    passes = {rank: _passes(r) for rank, r in trained.items()}
    if len(passes) < 2 or len({len(told) for told in passes.values()}) != 1:
        return None
    totals = {rank: (sum(b for _, b, _ in told), sum(n for _, _, n in told)) for rank, told in passes.items()}
    if min(batches for batches, _ in totals.values()) < MIN_BATCHES:
        return None
    rank = max(totals, key=lambda one: totals[one][1] / totals[one][0])
    each = [{one: told[k][2] / told[k][1] for one, told in passes.items()} for k in range(len(passes[rank]))]
    if not all(_of_others(sizes, rank) > 0 and sizes[rank] >= RATIO * _of_others(sizes, rank) for sizes in each):
        return None
    means = {one: numbers / batches for one, (batches, numbers) in totals.items()}
    return Heavier(rank, passes[rank][0][0].where, means[rank], _of_others(means, rank))


def _of_others(sizes: Mapping[int, float], rank: int) -> float:
    return pace.median([size for one, size in sizes.items() if one != rank])


def _passes(recording: Recording) -> list[tuple[Event, int, int]]:
    """(pass, batches, numbers in them) of those that are trained on."""
    told = [(e, e["weighed"]) for e in recording.of("pass") if number(e["backwards"])]
    known = [(e, number(w[0]), number(w[1])) for e, w in told if isinstance(w, list) and len(w) == 2]
    return [one for one in known if one[1] > 0]
