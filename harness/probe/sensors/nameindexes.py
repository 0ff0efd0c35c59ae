"""Indexes of names that a data set encodes its samples with: a vocabulary, a table of labels.

A dict in reach of the data set that gives each of its strings a number of its own, from 0 (or 1, or 2) on, and is about as long as a table of the
model has rows (an embedding, an output layer, not the width of a hidden one).
Event "name_index" (once, at the first backward under a pass; 8 at most): site (the line that assigns the attribute), owner, name, num, some [[digest of
the string, its number], ...] (128 with the smallest digests), stays (the source shows that the numbers reach no model), places (digest of the tables
of the same owner that they are places in; 0: of none).
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from .. import closures, cuts, digests, lookups, marks, names, origins, sites
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
    for thing, name, index in _indexes(datasets)[:MAX_TOLD]:
        if any(len(index) <= num <= len(index) + SPARE for num in rows):
            owner, (stays, places) = type(thing), _use(thing, name)
            some = sorted((crc32(str(key).encode()), value) for key, value in index.items())[:MAX_SOME]
            at = origins.attribute_line(owner, name) or sites.UNKNOWN
            S.recorder.event(
                "name_index", at, owner=owner.__name__, name=name, num=len(index), some=[list(pair) for pair in some], stays=stays, places=places
            )


def _rows() -> set[int]:
    """Rows of the embeddings and of the last layers that optimizers hold, and of the other matrices but those whose output another one takes: the
    width of a hidden layer is no number of names."""
    import torch

    held = {id(p): p for o in marks.optimizers() for g in o.param_groups for p in g["params"] if p.dim() == 2}
    taken = {int(p.shape[1]) for p in held.values()}
    found = {int(p.shape[0]) for p in held.values()} - taken
    for root in names.root_modules():
        modules = [m for m in root.modules() if id(getattr(m, "weight", None)) in held]
        tables = [m for m in modules if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
        linear = [m for m in modules if isinstance(m, torch.nn.Linear)]
        found |= {int(m.weight.shape[0]) for m in (*tables, *linear[-1:])}
    return found


def _use(owner: Any, name: str) -> tuple[bool, int]:
    """Whether the numbers stay with the script, and a digest of the tables of this owner that they are places in."""
    files = cuts.user_files()
    stay, tables = lookups.stay_inside(name, files) if len(files) <= cuts.MAX_FILES else (False, set())
    if not stay or not all(table in vars(owner) for table in tables):
        return False, 0
    return True, crc32(b"".join(_content(vars(owner)[table]) for table in sorted(tables))) if tables else 0


def _content(table: Any) -> bytes:
    if hasattr(table, "numel") and digests.plain(table):
        return str(digests.of_tensors([table])[0]).encode()
    return bytes(table.tobytes()[:4096]) if hasattr(table, "tobytes") else repr(table[:64] if isinstance(table, list) else table)[:4096].encode()


def _indexes(datasets: list[Any]) -> list[tuple[Any, str, dict[str, int]]]:
    found = []
    for thing in closures.reach(datasets, dict, depth=3):
        held = getattr(thing, "__dict__", None)
        if isinstance(held, dict) and not isinstance(thing, type):
            found += [(thing, name, value) for name, value in list(held.items())[:64] if is_index(value)]
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
