"""How the ranks' collectives pair up. The n-th collective of the default group on one rank meets the n-th of every other rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.checks.base import NotApplicable
from harness.record import Event, Run

# One rank may legally call these from a statement of its own: source and destination differ by design.
ROOTED = {"broadcast", "reduce", "gather", "scatter", "broadcast_object_list", "scatter_object_list", "gather_object"}
POINT_TO_POINT = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}
SIZED = {"all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "reduce_scatter"}
MAX_EVENTS = 3000  # what a recording keeps


@dataclass(frozen=True)
class Pairing:
    """The collectives of every present rank, in order."""

    ranks: tuple[int, ...]
    columns: tuple[Sequence[Event], ...]

    @property
    def shortest(self) -> int:
        return min(len(c) for c in self.columns)

    def at(self, n: int) -> list[Event]:
        return [c[n] for c in self.columns]

    @property
    def truncated(self) -> bool:
        return any(len(c) >= MAX_EVENTS for c in self.columns)

    def first_mismatch(self) -> int | None:
        """First n at which the ranks issue different operations, or the same from statements that cannot meet."""
        for n in range(self.shortest):
            events = self.at(n)
            if len({e["op"] for e in events}) > 1:
                return n
        return None


def of(run: Run) -> Pairing:
    """NotApplicable where there is nothing to pair."""
    if run.world_size < 2:
        raise NotApplicable("one process")
    ranks = [rank for rank, r in enumerate(run.ranks) if r is not None]
    columns = [[e for e in run.ranks[rank].of("coll") if e["world"] is not False and e["op"] not in POINT_TO_POINT] for rank in ranks]  # type: ignore[union-attr]
    if len(ranks) < 2 or not any(columns):
        raise NotApplicable("the script calls no collective itself")
    return Pairing(tuple(ranks), tuple(columns))


def site_key(event: Event) -> tuple[str, int]:
    where = event.where
    return (where.file.rsplit("/", 1)[-1], where.line) if where else ("", 0)


def only_on(pairing: Pairing, event: Event) -> list[int]:
    """Ranks that ever issued a collective from the statement of `event`."""
    key = site_key(event)
    return [rank for rank, column in zip(pairing.ranks, pairing.columns, strict=True) if any(site_key(e) == key for e in column)]


def passed_by(run: Run, ranks: Sequence[int], event: Event) -> bool:
    """Whether the ranks that lack this collective had their chance: they took as many optimizer steps, or ended."""
    for rank in ranks:
        recording = run.ranks[rank]
        if recording is None or recording.num_steps < event.step:
            return False
    return True
