"""Losses, and numbers read with item(), that the ranks measured without gradients, aligned over the ranks: what a reported number is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.checks.evl import evaluations
from harness.checks.evl.reports import Value
from harness.model import Where
from harness.record import Event, Run, number


@dataclass(frozen=True)
class Measured:
    """A stretch of loss calls of one statement on one rank."""

    rank: int
    event: Event

    @property
    def where(self) -> Where | None:
        return self.event.where

    @property
    def of(self) -> str:
        return str(self.event["of"])

    @property
    def at(self) -> int:
        return number(self.event["at"])

    @property
    def first_t(self) -> int:
        return number(self.event["first_t"])

    @property
    def last_t(self) -> int:
        return number(self.event["last_t"])

    @property
    def rows(self) -> int:
        return number(self.event["rows"])

    @property
    def once(self) -> bool:
        """A single number that was read, not one of each batch: made from the whole share."""
        return self.of == "item" and number(self.event["num"]) == 1

    def value(self, name: str) -> float:
        found = self.event[name]
        return float(found) if isinstance(found, (int, float)) else math.nan

    @property
    def means(self) -> tuple[float, ...]:
        """Over calls and over samples; of numbers read with item(), which may be counts, their sum over the samples too."""
        return (self.value("mean"), self.value("weighted"), *((self.value("sum") / max(1, self.rows),) if self.of == "item" else ()))


def of_rank(run: Run, rank: int) -> list[Measured]:
    recording = run.ranks[rank]
    return [Measured(rank, e) for e in recording.of("measured")] if recording is not None else []


def aligned(run: Run) -> list[list[Measured]]:
    """The n-th stretch at one statement on every rank; only those that all ranks made at the same step."""
    found = run.__dict__.get("_measured")
    if isinstance(found, list):
        return found
    tables: dict[tuple[str, int, str, int], dict[int, Measured]] = {}
    for rank in range(len(run.ranks)):
        counts: dict[tuple[str, int, str], int] = {}
        for one in of_rank(run, rank):
            key = (one.where.file.rpartition("/")[-1] if one.where else "", one.where.line if one.where else 0, one.of)
            nth = counts[key] = counts.get(key, -1) + 1
            tables.setdefault((*key, nth), {})[rank] = one
    groups = [[t[r] for r in sorted(t)] for t in tables.values() if len(t) == run.world_size > 1]
    run.__dict__["_measured"] = groups = [g for g in groups if len({m.at for m in g}) == 1]
    return groups


def sharded(run: Run) -> list[list[Measured]]:
    """Groups in which every rank measured on a share of its own: losses on other targets, and what was read beside such losses or passes."""
    groups = aligned(run)
    losses = [
        g for g in groups if g[0].of == "loss" and all(m.event["targets"] for m in g) and len({m.event["targets"] for m in g}) == len(g)
    ]
    at = {g[0].at for g in losses} | {g[0].step for g in evaluations.aligned(run) if evaluations.sharded(g)}
    return losses + [g for g in groups if g[0].of == "item" and g[0].at in at]


def overall(group: Sequence[Measured]) -> tuple[float, ...]:
    """What `means` are of all ranks together."""
    num = sum(number(m.event["num"]) for m in group)
    rows = sum(m.rows for m in group)
    total, read = sum(m.value("total") for m in group), sum(m.value("sum") for m in group)
    return read / max(1, num), total / max(1, rows), read / max(1, rows)


def is_own(value: Value, one: Measured, group: Sequence[Measured]) -> float | None:
    """Whether a reported number is a mean of what this rank measured and none of what all did (then: what it would be); percent count."""
    everybody = overall(group)
    if value.digits < 3 or any(value.is_near(e) or value.is_near(100 * e) for e in everybody):
        return None
    for own, whole in zip(one.means, everybody, strict=False):
        if value.is_near(own):
            return whole
        if one.of == "item" and value.is_near(100 * own):
            return 100 * whole
    return None


def tells(value: Value, one: Measured, group: Sequence[Measured]) -> bool | None:
    """Whether a number is what this rank measured; None where what all did is written alike."""
    if value.digits < 3:
        return None
    if is_own(value, one, group) is not None:
        return True
    return False if all(value.is_far(m) and (one.of != "item" or value.is_far(100 * m)) for m in one.means) else None
