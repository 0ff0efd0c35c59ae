"""Folders that ranks make at one statement, under names that differ by the time of day."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from harness.checks.order import Clocks
from harness.model import Where
from harness.record import Run

_DIGITS = re.compile(r"\d+")
_CLOCK = re.compile(r"(\d{1,2}[-_:.h]?\d{2}[-_:.m]?\d{2})|\d{9,}")  # hours, minutes and seconds, or seconds since 1970


@dataclass
class Apart:
    """One statement, a folder a rank."""

    where: Where | None
    paths: dict[int, str] = field(default_factory=dict)


def apart(run: Run, clocks: Clocks) -> list[Apart]:
    """Statements at which every rank made a folder of its own, alike but for digits that tell the time and not the rank."""
    made: dict[tuple[str, int], Apart] = {}
    moments: dict[tuple[str, int], set[int]] = {}
    for rank, event in run.events("mkdir"):
        where = event.where
        if where is not None and rank not in made.setdefault((where.file, where.line), Apart(where)).paths:
            made[(where.file, where.line)].paths[rank] = str(event["path"])
            moments.setdefault((where.file, where.line), set()).add(clocks.at(rank, event))
    return [one for key, one in made.items() if len(one.paths) == len(run.present) > 1 and len(moments[key]) == 1 and _by_clock(run, one)]


def _by_clock(run: Run, one: Apart) -> bool:
    if len({_DIGITS.sub("#", p) for p in one.paths.values()}) != 1 or len(set(one.paths.values())) == 1:
        return False
    columns = [[_DIGITS.findall(p)[i] for p in one.paths.values()] for i in range(len(_DIGITS.findall(next(iter(one.paths.values())))))]
    own = {rank: {str(rank), str(getattr(run.ranks[rank], "pid", ""))} for rank in one.paths}
    for column in columns:
        if len(set(column)) > 1 and all(_bare(v) in own[rank] for rank, v in zip(one.paths, column, strict=True)):
            return False
    return all(_CLOCK.search(p) for p in one.paths.values())


def _bare(digits: str) -> str:
    return digits.lstrip("0") or "0"
