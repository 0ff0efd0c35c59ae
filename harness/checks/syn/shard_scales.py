"""Shards of one gradient that the ranks multiply by factors of their own between the backward and the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.model import Where
from harness.record import Event, Run

MIN_STEPS = 2
APART = 1e-3  # of the larger factor; a full norm's last bits may differ


@dataclass(frozen=True)
class Apart:
    """The first step at which the factors differ."""

    step: int
    name: str
    factors: tuple[tuple[int, float], ...]  # (rank, factor)
    num_steps: int
    where: Where | None


def find(run: Run) -> Apart | None:
    """None where fewer than two steps show it, or one of several gradients alone does: that may be chance, or a layer's own affair."""
    hits = []
    for events in _aligned(run):
        compared = list(_compared(run.rank_ids, events))
        apart = [(name, factors) for name, factors, unit in compared if _differ([f for _, f in factors], unit)]
        if apart and (len(apart) > 1 or len(compared) == 1):
            hits.append((events, *apart[0]))
    if len({events[0].step for events, _, _ in hits}) < MIN_STEPS:
        return None
    events, name, factors = hits[0]
    where = next((e.where for e in events if e.where is not None), None)
    return Apart(events[0].step, name, factors, len({events[0].step for events, _, _ in hits}), where)


def _aligned(run: Run) -> list[list[Event]]:
    """Events of one (step, optimizer), a rank each."""
    tables = [{(e.step, e["opt"]): e for e in r.of("shard_scale")} for r in run.present]
    common = set(tables[0]).intersection(*tables[1:]) if len(tables) > 1 else set()
    return [[t[key] for t in tables] for key in sorted(common)]


def _compared(ranks: Sequence[int], events: Sequence[Event]) -> Iterator[tuple[str, tuple[tuple[int, float], ...], float]]:
    """(parameter, its factor on each rank of one mesh, unit of rounding), where two ranks of the mesh tell theirs."""
    meshes: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for rank, event in zip(ranks, events, strict=True):
        for name, factor, unit, mesh in event["scales"] or ():
            if isinstance(factor, float) and isinstance(unit, float):
                meshes.setdefault((str(name), repr(mesh)), []).append((rank, factor, unit))
    for (name, _), told in meshes.items():
        if len(told) > 1:
            yield name, tuple((rank, factor) for rank, factor, _ in told), max(unit for _, _, unit in told)


def _differ(factors: Sequence[float], unit: float) -> bool:
    return max(factors) - min(factors) > max(APART, 8 * unit) * max(map(abs, factors))
