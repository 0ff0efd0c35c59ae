"""Running statistics of normalisation layers that every rank keeps for itself, where the script averages weights or gradients by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.checks import regime
from harness.checks.evl import evaluations
from harness.checks.syn import replicas
from harness.model import Where
from harness.probe import protocol
from harness.record import Event, Run, number

APART = 0.25  # of a standard deviation, over a layer's channels: statistics of shares of one shuffled set differ by less
WRAPPERS = ("wrap", "data_parallel", "model_averager")
TELLING = ("all_reduce", "reduce", "all_gather", *protocol.GATHER_INTO, "gather", "gather_single", "all_gather_object", "gather_object")


@dataclass(frozen=True)
class Apart:
    """Evaluations of one model with equal weights and the ranks' own statistics, and the one rank that saves its own."""

    averaged: Where | None  # the statement that averages
    evaluated: Event
    layer: str
    gap: float  # in deviations
    saver: int
    saved: Event


def find(run: Run) -> Apart | None:
    """None where each client keeps, and saves, its own on purpose, and where the statistics hardly differ."""
    if run.world_size < 2 or any(True for kind in WRAPPERS for _ in run.events(kind)) or regime.sharded(run):
        return None
    apart = [group for group in _aligned(run) if _differ(group) and evaluations.told_behind(run, group[0], TELLING)]
    numels = [number(n) for _, e in itertools.islice(run.events("params"), 1) for n in e["numels"] or ()]
    carried = replicas.carrying(run, numels) if apart else []
    averaged = [e for e in carried if e["numel"] in (sum(numels), max(numels))]
    saver = _saver(run, apart) if averaged else None
    if saver is None:
        return None
    layer, gap = _widest([group for group in apart if group[0]["layers"]][-1:])
    return Apart(averaged[-1].where, apart[-1][0], layer, gap, *saver) if gap >= APART else None


def _aligned(run: Run) -> list[list[Event]]:
    """The n-th evaluation at one statement on every rank."""
    tables: dict[tuple[object, ...], list[Event]] = {}
    for recording in run.present:
        counts: dict[object, int] = {}
        for event in recording.of("evaluated"):
            nth = counts[event.where] = counts.get(event.where, -1) + 1
            tables.setdefault((event.where, event["module"], nth), []).append(event)
    return [group for group in tables.values() if len(group) == run.world_size]


def _differ(group: Sequence[Event]) -> bool:
    """One model but for its statistics, on every rank with samples of its own."""
    stats = {number(e["stats"]) for e in group}
    return 0 not in stats and len(stats) > 1 and len({e["params"] for e in group}) == 1 and len({e["inputs"] for e in group}) == len(group)


def _saver(run: Run, apart: Sequence[Sequence[Event]]) -> tuple[int, Event] | None:
    """The one rank that saves statistics, which are those that it has evaluated with."""
    saves = list(run.events("statistics_saved"))
    own = [(rank, e) for rank, e in saves if any(number(group[rank]["stats"]) == e["stats"] for group in apart)]
    return own[-1] if own and len({rank for rank, _ in saves}) == 1 else None


def _widest(groups: Sequence[Sequence[Event]]) -> tuple[str, float]:
    """The layer whose statistics are furthest apart, and how far."""
    found = ("", 0.0)
    for layers in (some for group in groups for some in zip(*(e["layers"] or () for e in group), strict=False)):
        name, gap = str(layers[0][0]), _gap([layer[1] for layer in layers], [layer[2] for layer in layers])
        found = (name, gap) if gap > found[1] else found
    return found


def _gap(means: Sequence[Sequence[float]], variances: Sequence[Sequence[float]]) -> float:
    """Root mean square over the channels of the widest distance between two ranks' means, in deviations."""
    apart = []
    for values, spreads in zip(zip(*means, strict=False), zip(*variances, strict=False), strict=False):
        spread = sum(spreads) / len(spreads)
        if spread > 1e-12 and all(math.isfinite(v) for v in values):
            apart.append((max(values) - min(values)) ** 2 / spread)
    return math.sqrt(sum(apart) / len(apart)) if apart else 0.0
