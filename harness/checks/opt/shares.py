"""Losses that are a rank's share of one mean over all ranks: a local sum divided by the count of all ranks. Read from what was reduced before a
backward and what its loss was divided by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.checks.evl import reductions
from harness.model import Where
from harness.record import Event, Run, number, where_of

TINY = 1e-6
MIN_STEPS, MIN_COUNTS = 4, 3


@dataclass(frozen=True)
class Counted:
    """A whole number that all ranks summed up before a backward, as one rank saw it."""

    value: float
    own: float
    rows: int  # samples of the rank's last batch
    where: Where | None


@dataclass(frozen=True)
class Share:
    """The losses of one backward call, each divided by the count of all ranks."""

    where: Where | None  # the backward
    made: Where | None
    counted: Where | None  # where the ranks sum the count up
    counts: tuple[float, ...]  # a step, as rank 0 saw them
    certain: bool  # no chance equality of two numbers, and nothing that may make up for it


def of(run: Run) -> list[Share]:
    """Shares whose quotients bear no factor of the number of ranks, on every rank and at every backward that was looked at."""
    found = run.__dict__.get("_shares")
    if not isinstance(found, list):
        found = run.__dict__["_shares"] = _read(run)
    return found


def _read(run: Run) -> list[Share]:
    if run.world_size < 2 or not all(r.of("share") for r in run.present):
        return []
    counts, by_site = _counts(run), dict[tuple[str, int], list[tuple[int, Event]]]()
    for rank, recording in enumerate(run.ranks):
        for event in recording.of("share") if recording is not None else ():
            if event.where:
                by_site.setdefault((event.where.file, event.where.line), []).append((rank, event))
    return [share for events in by_site.values() if (share := _judge(run, events, counts)) is not None]


def _counts(run: Run) -> dict[tuple[int, int], list[Counted]]:
    """By rank and step; entries that are whole on every rank, and that two ranks at least added to."""
    found: dict[tuple[int, int], list[Counted]] = {}
    predivided = {(e.where.file, e.where.line) for _, e in run.events("summed") if e["predivided"] and e.where}
    for one in reductions.aligned(run):
        if one.kind != "sum" or one.events[0]["op"] != "all_reduce" or (one.where and (one.where.file, one.where.line) in predivided):
            continue
        for i, total in enumerate(one.after):
            given = [b[i] for b in one.before]
            if not all(map(math.isfinite, (total, *given))) or total <= 1:  # an overflow is reduced as well
                continue
            if any(v < 0 or v != int(v) for v in given) or abs(sum(given) - total) > TINY * total or max(given) >= total:
                continue
            for rank, own in enumerate(given):
                counted = Counted(total, own, number(one.events[rank]["rows"]), one.where)
                found.setdefault((rank, one.step(rank)), []).append(counted)
    return found


def _judge(run: Run, events: list[tuple[int, Event]], counts: Mapping[tuple[int, int], list[Counted]]) -> Share | None:
    hits: list[tuple[int, Counted, bool]] = []
    for rank, event in events:
        hit = _hit(run, event, counts.get((rank, event.step), []))
        if hit is None:
            return None
        hits.append((rank, *hit))
    if {rank for rank, _, _ in hits} != set(range(run.world_size)):
        return None
    values = tuple(c.value for rank, c, _ in hits if rank == 0)
    if len(values) < MIN_STEPS:
        return None
    # a count that never varies may be another number's equal: then it must be that very tensor, and count the batch in full
    made_up = any(e["given"] or e["made_up"] for _, e in events)
    certain = len(set(values)) >= MIN_COUNTS or all(same and counted.own == counted.rows for _, counted, same in hits)
    first = events[0][1]
    return Share(first.where, where_of(first["made"]), hits[0][1].where, values, certain and not made_up)


def _hit(run: Run, event: Event, counted: list[Counted]) -> tuple[Counted, bool] | None:
    """The count that a part of this loss is divided by with nothing that makes up for the number of ranks."""
    for told in event["quotients"] or ():
        for one in counted:
            if abs(told["value"] - one.value) <= TINY * one.value and _bare(run, told):
                return one, bool(told["same"])
    return None


def _bare(run: Run, told: Mapping[str, Any]) -> bool:
    """A sum over its own samples; no factor above but 1 and the micro-batches' 1/n, none below that is a multiple of the number of ranks."""
    backwards = max((max(r.column("num_backward"), default=1) for r in run.present), default=1)
    usual = (1.0, 1.0 / max(1, backwards))
    above = all(any(abs(f - u) <= TINY for u in usual) for f in told["above"])
    return above and not told["mean"] and not any(abs(f) >= 1 + TINY and abs(f / run.world_size - round(f / run.world_size)) <= TINY for f in told["below"])
