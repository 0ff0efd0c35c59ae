"""Indexes of names that a data set encodes its samples with: a vocabulary, a table of labels.

A dict in reach of the data set that gives each of its strings a number of its own, from 0 (or 1, or 2) on, and is about as long as a table of the
model has rows (an embedding, an output layer).
Event "name_index" (once, at the first backward under a pass; 8 at most): site (the line that assigns the attribute), owner, name, num, some [[digest of
the string, its number], ...] (128 with the smallest digests).
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from .. import closures, marks, origins, sites
from ..patching import contained
from ..state import S
from . import backward

MAX_TOLD, MAX_SOME, MIN_NUM, MAX_NUM, SPARE = 8, 128, 4, 200_000, 4
_told = [0]


@contained
def _at_backward(loss: Any) -> None:
    if _told[0] or not S.loops or S.recorder.role != "main":
        return
    datasets = [d for loop in S.loops if loop.dataset is not None and (d := loop.dataset()) is not None]
    rows = _rows()
    if not datasets or not rows:
        return
    _told[0] = 1
    for owner, name, index in _indexes(datasets)[:MAX_TOLD]:
        if any(len(index) <= num <= len(index) + SPARE for num in rows):
            some = sorted((crc32(str(key).encode()), value) for key, value in index.items())[:MAX_SOME]
            at = origins.attribute_line(owner, name) or sites.UNKNOWN
            S.recorder.event("name_index", at, owner=owner.__name__, name=name, num=len(index), some=[list(pair) for pair in some])


def _rows() -> set[int]:
    """First dimensions of the matrices that optimizers hold."""
    return {int(p.shape[0]) for o in marks.optimizers() for g in o.param_groups for p in g["params"] if p.dim() == 2}


def _indexes(datasets: list[Any]) -> list[tuple[type, str, dict[str, int]]]:
    found = []
    for thing in closures.reach(datasets, dict, depth=3):
        held = getattr(thing, "__dict__", None)
        if isinstance(held, dict) and not isinstance(thing, type):
            found += [(type(thing), name, value) for name, value in list(held.items())[:64] if is_index(value)]
    return found


def is_index(value: Any) -> bool:
    """Strings, each with a number of its own out of a gapless row."""
    if type(value) is not dict or not MIN_NUM <= len(value) <= MAX_NUM or not all(type(k) is str for k in value):
        return False
    numbers = list(value.values())
    if not all(type(n) is int for n in numbers):
        return False
    low = min(numbers)
    return 0 <= low <= 2 and len(set(numbers)) == len(numbers) and max(numbers) - low < len(numbers) + SPARE


def arm() -> None:
    backward.at_backward.append(_at_backward)
