"""Measurements as the checks see them: evaluation passes over loaders, and forwards in eval mode of loops without one, aligned over the
ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.model import Where
from harness.record import Event, Recording, Run, number

MAX_NUMBERS = 8  # a score and what it is divided by, not a tensor that is trained with


@dataclass(frozen=True)
class Evaluation:
    """One measurement of one rank."""

    rank: int
    where: Where | None
    opened_ns: int
    ended_ns: int
    step: int
    y: int  # synchronisations when it ended
    synced_inside: bool
    num_samples: int
    inputs: int  # digest of what was measured on, in order; 0: not known
    one: Pass | None  # the pass, where there is a loader

    @property
    def key(self) -> tuple[Any, ...]:
        if self.one is not None:
            return self.one.key
        return (self.where.file.rpartition("/")[-1], self.where.line, 0) if self.where else ("", 0, 0)


def of_rank(run: Run, rank: int, recording: Recording) -> list[Evaluation]:
    """In order of time."""
    found: list[Evaluation] = []
    for one in passes.of_recording(rank, recording):
        if one.evaluates and one.closed is not None:
            y = number(one.closed["y"])
            inside = y != number(one.opened["y"]) or number(one.closed["collectives"]) > 0
            found.append(
                Evaluation(
                    rank,
                    one.where,
                    one.opened.t_ns,
                    one.closed.t_ns,
                    one.closed.step,
                    y,
                    inside,
                    one.num_samples,
                    one.content or one.order,
                    one,
                )
            )
    for event in recording.of("evaluated"):
        begin, end = number(event["first_t"]), number(event["last_t"])
        if event["looped"] or any(e.opened_ns <= begin <= e.ended_ns for e in found if e.one is not None):
            continue
        y = number(event["last_y"])
        found.append(
            Evaluation(
                rank,
                event.where,
                begin,
                end,
                event.step,
                y,
                y != number(event["first_y"]),
                number(event["rows"]),
                number(event["inputs"]),
                None,
            )
        )
    return sorted(found, key=lambda e: e.ended_ns)


def by_rank(run: Run) -> list[list[Evaluation]]:
    """Evaluations of every rank; read once a judgement."""
    found = run.__dict__.get("_evaluations")
    if not isinstance(found, list):
        found = [of_rank(run, rank, r) if r is not None else [] for rank, r in enumerate(run.ranks)]
        run.__dict__["_evaluations"] = found
    return found


def aligned(run: Run) -> list[list[Evaluation]]:
    """The n-th evaluation at one statement on every rank; only those that all ranks made."""
    tables: dict[tuple[Any, ...], dict[int, Evaluation]] = {}
    for rank, own in enumerate(by_rank(run)):
        counts: dict[tuple[Any, ...], int] = {}
        for one in own:
            nth = counts[one.key] = counts.get(one.key, -1) + 1
            tables.setdefault((*one.key, nth), {})[rank] = one
    return [[t[r] for r in sorted(t)] for t in tables.values() if len(t) == run.world_size > 1]


def told_behind(run: Run, first: Event, ops: Sequence[str]) -> bool:
    """A few numbers go to the other ranks behind an "evaluated" of rank 0, before the next step."""
    calls = [e for e in run.present[0].of("coll") if e.step == first.step and e.t_ns >= number(first["first_t"]) and e["op"] in ops]
    return any(number(e["numel"]) <= MAX_NUMBERS for e in calls)


def lonely(run: Run) -> list[Evaluation]:
    """Evaluations of some ranks only, under a sampler that gives them a share: the rest of the data is measured by nobody."""
    everywhere = {e.key for group in aligned(run) for e in group}
    return [
        e
        for own in by_rank(run)
        for e in own
        if e.one is not None and e.key not in everywhere and e.one.exhausted and number((e.one.distributed or {}).get("num_replicas")) > 1
    ]


def sharded(group: Sequence[Evaluation]) -> bool:
    """Each rank measured on data of its own, and on a part: to the end of its loader, under a distributed sampler or on other samples."""
    passed = [e.one for e in group if e.one is not None]
    if len(passed) < len(group):
        return all(e.inputs for e in group) and len({e.inputs for e in group}) == len(group)
    if not all(p.exhausted for p in passed):
        return False
    if all(p.distributed is not None and number(p.distributed.get("num_replicas")) > 1 for p in passed):
        return len({repr((p.distributed or {}).get("rank")) for p in passed}) == len(passed)
    rows = [set(p.rows) for p in passed]
    if all(p.distinct for p in passed):
        return len(set.union(*rows)) > 1.2 * max(len(r) for r in rows)
    sets = [set(p.indices) for p in passed]
    return all(sets) and (len(set.union(*sets)) > 1.2 * max(len(s) for s in sets))


def whole(group: Sequence[Evaluation]) -> bool:
    """Every rank measured on the same samples."""
    passed = [e.one for e in group if e.one is not None]
    if len(passed) < len(group):
        return bool(group[0].inputs) and len({e.inputs for e in group}) == 1
    if any(p.distributed is not None for p in passed) or not all(p.exhausted for p in passed):
        return False
    if all(p.distinct for p in passed):
        return len({frozenset(p.rows) for p in passed}) == 1
    if all(p.rows for p in passed) and len({tuple(sorted(p.rows)) for p in passed}) > 1:
        return False  # each rank numbers the samples of its own part from 0 on
    return all(p.indices for p in passed) and len({frozenset(p.indices) for p in passed}) == 1 and len({p.dataset_len for p in passed}) == 1
