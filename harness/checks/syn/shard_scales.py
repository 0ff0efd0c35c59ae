"""Shards of one gradient that the ranks multiply by factors of their own between the backward and the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.model import Where
from harness.record import Event, Run

MIN_STEPS = 2
Factors = tuple[tuple[int, float], ...]  # (rank, factor)
APART = 1e-3  # of the larger factor; a full norm's last bits may differ


@dataclass(frozen=True)
class Apart:
    """The first step at which the factors differ. `whole`: on each rank one factor covers all of its shards that were looked at, several of them.
    `flat`: they are parts of a vector, which is cut by numbers of elements."""

    step: int
    name: str
    factors: Factors
    num_steps: int
    where: Where | None
    whole: bool
    flat: bool


def find(run: Run) -> Apart | None:
    """None where fewer than two steps show it, or one of several gradients alone does: that may be chance, or a layer's own affair. None where the
    ranks' factors keep their proportion, as no norms do: rows are weighed, which happen to be cut where the shards are."""
    hits = []
    for events in _aligned(run):
        compared = list(_compared(run.rank_ids, events))
        apart = [(name, factors) for name, factors, unit in compared if _differ([f for _, f in factors], unit)]
        if apart and (len(apart) > 1 or len(compared) == 1):
            hits.append((events, dict(apart)))
    num = len({events[0].step for events, _ in hits})
    unit = max((_unit(e) for events, _ in hits for e in events), default=0.0)
    if num < MIN_STEPS or not _vary([apart for _, apart in hits], unit):
        return None
    events, first = hits[0]
    name, factors = next(iter(first.items()))
    where = next((e.where for e in events if e.where is not None), None)
    whole = all(len(parted) > 1 and all(map(_is_one, told)) for told, parted in hits)
    return Apart(events[0].step, name, factors, num, where, whole, all(e["flat"] is True for e in events))


def _told(event: Event) -> Iterator[tuple[str, float, float, str]]:
    """(parameter, factor, unit of rounding, mesh)."""
    for name, factor, unit, mesh in event["scales"] or ():
        if isinstance(factor, float) and isinstance(unit, float):
            yield str(name), factor, unit, repr(mesh)


def _unit(event: Event) -> float:
    return max((unit for _, _, unit, _ in _told(event)), default=0.0)


def _is_one(event: Event) -> bool:
    factors = [factor for _, factor, _, _ in _told(event)]
    return not _differ(factors, _unit(event))


def _vary(hits: Sequence[dict[str, Factors]], unit: float) -> bool:
    """Whether the proportion of the ranks' factors of some gradient is another at another step."""
    seen: dict[tuple[str, tuple[int, ...]], list[list[float]]] = {}
    for name, factors in (item for apart in hits for item in apart.items()):
        most = max(abs(f) for _, f in factors)
        seen.setdefault((name, tuple(rank for rank, _ in factors)), []).append([f / most for _, f in factors])
    return any(max(column) - min(column) > max(APART, 8 * unit) for rows in seen.values() for column in zip(*rows, strict=True))


def _aligned(run: Run) -> list[list[Event]]:
    """Events of one (step, optimizer), a rank each."""
    tables = [{(e.step, e["opt"]): e for e in r.of("shard_scale")} for r in run.present]
    common = set(tables[0]).intersection(*tables[1:]) if len(tables) > 1 else set()
    return [[t[key] for t in tables] for key in sorted(common)]


def _compared(ranks: Sequence[int], events: Sequence[Event]) -> Iterator[tuple[str, Factors, float]]:
    """(parameter, its factor on each rank of one mesh, unit of rounding), where two ranks of the mesh tell theirs."""
    meshes: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for rank, event in zip(ranks, events, strict=True):
        for name, factor, unit, mesh in _told(event):
            meshes.setdefault((name, mesh), []).append((rank, factor, unit))
    for (name, _), told in meshes.items():
        if len(told) > 1:
            yield name, tuple((rank, factor) for rank, factor, _ in told), max(unit for _, _, unit in told)


def _differ(factors: Sequence[float], unit: float) -> bool:
    return max(factors) - min(factors) > max(APART, 8 * unit) * max(map(abs, factors))
