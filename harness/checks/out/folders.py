"""Folders and files that ranks make at one statement, under names that differ by the time of day or by chance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.checks.order import Clocks
from harness.model import Where
from harness.record import Run

_DIGITS = re.compile(r"\d+")
_CLOCK = re.compile(r"(\d{1,2}[-_:.h]?\d{2}[-_:.m]?\d{2})|\d{9,}")  # hours, minutes and seconds, or seconds since 1970
_CHANCE = re.compile(r"[0-9a-f]{6,}(-[0-9a-f]{4,})*")  # a piece of a uuid or a hash; one of six places in sixteen has no letter or no digit
_MIXED = re.compile(r"(?=[0-9a-f-]*\d)(?=[0-9a-f-]*[a-f])[0-9a-f]{6,}")
_SCRATCH = re.compile(r"^/(tmp|var/tmp|scratch)/[^/]*$")  # what tempfile makes is each process's own on purpose


@dataclass
class Apart:
    """One statement, a folder or file a rank."""

    where: Where | None
    kind: str  # "mkdir" | "open"
    paths: dict[int, str] = field(default_factory=dict)


def apart(run: Run, clocks: Clocks) -> list[Apart]:
    """Statements at which every rank made one of its own, alike but for digits that tell the time and not the rank."""
    made: dict[tuple[str, str, int], Apart] = {}
    moments: dict[tuple[str, str, int], set[int]] = {}
    for kind in ("mkdir", "open"):
        for rank, event in run.events(kind):
            where, path = event.where, str(event["path"] or "")
            if where is None or _SCRATCH.match(path) or (kind == "open" and event["mode"] not in ("w", "a", "x")):
                continue
            key = (kind, where.file, where.line)
            mine = made.setdefault(key, Apart(where, kind)).paths
            if rank not in mine or path.startswith(mine[rank] + "/"):  # makedirs makes the parents first
                mine[rank] = path
                moments.setdefault(key, set()).add(clocks.at(rank, event))
    found = [one for key, one in made.items() if len(one.paths) == len(run.present) > 1 and len(moments[key]) == 1]
    return [one for one in found if _alike(run, one) and not any(_within(one, o) for o in found if o.kind == "mkdir" and o is not one)]


def _within(one: Apart, folder: Apart) -> bool:
    """A file in a folder that is told already."""
    return all(rank in folder.paths and path.startswith(folder.paths[rank] + "/") for rank, path in one.paths.items())


def _alike(run: Run, one: Apart) -> bool:
    paths = list(one.paths.values())
    if len(set(paths)) == 1:
        return False
    by_clock = len({_DIGITS.sub("#", p) for p in paths}) == 1 and all(_CLOCK.search(p) for p in paths) and not _names_rank(run, one)
    return _by_chance(paths) or by_clock


def _by_chance(paths: Sequence[str]) -> bool:
    """They differ in pieces only that are a uuid's on one rank at least: a rank's number in six digits is none."""
    if len({_CHANCE.sub("~", p) for p in paths}) > 1:
        return False
    columns = zip(*([m.group() for m in _CHANCE.finditer(p)] for p in paths), strict=True)
    return all(any(_MIXED.search(piece) for piece in column) for column in columns if len(set(column)) > 1)


def _names_rank(run: Run, one: Apart) -> bool:
    """A number in the name is the rank, or the process id, on every rank."""
    own = {rank: {str(rank), str(getattr(run.ranks[rank], "pid", ""))} for rank in one.paths}
    columns = zip(*(_DIGITS.findall(p) for p in one.paths.values()), strict=True)
    return any(len(set(c)) > 1 and all(_bare(v) in own[rank] for rank, v in zip(one.paths, c, strict=True)) for c in columns)


def _bare(digits: str) -> str:
    return digits.lstrip("0") or "0"
