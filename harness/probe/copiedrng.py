"""Random generators that a data set holds, itself or in a transform: every forked worker draws from a copy, in the state at the fork.

In a worker, of its first two fetches: the generators that moved in both, in which state they were found, and left. A worker_init_fn that
gives each worker its own changes what is found; a data set that seeds anew for each sample, by its index, changes what is left.
"""

from __future__ import annotations

import inspect
import mmap
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from zlib import crc32

from . import datasets, digests, origins, sites
from .patching import contained

MAX_WORKERS, MAX_OBJECTS, MAX_DEPTH, MAX_NAMES = 8, 24, 3, 60
ENTRY = struct.Struct("<4Q")  # name, found, left by the first fetch, left by the second
BYTES = ENTRY.size * MAX_WORKERS


def held(dataset: Any) -> Iterator[tuple[str, Any, str, int]]:
    """(name as the script would write it, object, attribute, digest of the state) of each generator."""
    todo, seen = [("", dataset, 0)], {id(dataset)}
    while todo and len(seen) <= MAX_OBJECTS:
        path, thing, depth = todo.pop(0)
        for name, value in list(vars(thing).items())[:MAX_NAMES] if hasattr(thing, "__dict__") else ():
            state = datasets.generator_state(value)
            if state:
                yield path + name, thing, name, state
                continue
            for part in value[:MAX_OBJECTS] if isinstance(value, (list, tuple)) else [value]:
                if depth < MAX_DEPTH and may_hold(part) and id(part) not in seen:
                    seen.add(id(part))
                    todo.append((f"{path}{name}.", part, depth + 1))


def may_hold(thing: Any) -> bool:
    return hasattr(thing, "__dict__") and not isinstance(thing, type) and not hasattr(type(thing), "parameters") and not _plain(thing)


def _plain(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] in ("builtins", "numpy", "types", "collections", "functools")


def watch(dataset: Any, page: mmap.mmap, at: int) -> Callable[[int], None]:
    """In a worker, before a fetch; what it returns is called with the number of the fetch, from 0, after it."""
    earlier = _states(dataset) or {}

    @contained
    def tell(nth: int) -> None:
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        if worker is None or worker.id >= MAX_WORKERS or not earlier:
            return
        now, place = _states(dataset) or {}, at + ENTRY.size * worker.id
        moved = sorted(n for n in earlier if n in now and now[n] != earlier[n])
        name = crc32(moved[0].encode()) if moved else 0
        found, left = _digest(earlier, moved), _digest(now, moved)
        if nth == 0:
            ENTRY.pack_into(page, place, name, found, left, 0)
        elif name and (told := ENTRY.unpack_from(page, place))[0] == name and told[2] == found:
            ENTRY.pack_into(page, place, *told[:3], left)

    return tell


@contained
def _states(dataset: Any) -> dict[str, int]:
    return {path: state for path, _, _, state in held(dataset)}


def _digest(states: dict[str, int], names: list[str]) -> int:
    return digests.wide(repr([(n, states[n]) for n in names]).encode()) if names else 0


def told(dataset: Any, page: mmap.mmap, at: int, num_workers: int) -> dict[str, Any] | None:
    """In the rank: name, site (where the generator is made), batched (the data set fetches a batch in one call), workers: [found, left, left (0: no
    second fetch, or it drew nothing)] of each that drew."""
    rows = [ENTRY.unpack_from(page, at + ENTRY.size * w) for w in range(min(num_workers, MAX_WORKERS))]
    rows = [r for r in rows if all(r[:3])]
    if not rows:
        return None
    name, owner, attribute = next(((p, o, a) for p, o, a, _ in held(dataset) if crc32(p.encode()) == rows[0][0]), ("", None, ""))
    if not name or len({r[0] for r in rows}) > 1:
        return None
    made = origins.attribute_line(type(owner), attribute)
    site = sites.as_json(made) if made is not None else None
    return {"name": name, "site": site, "batched": batched(dataset), "workers": [list(r[1:]) for r in rows]}


def batched(dataset: Any) -> bool:
    """Whether what a loader calls for a batch is the script's own `__getitems__`, which may draw once for all of it; that of Subset calls for each sample."""
    from torch.utils.data import Subset

    for _ in range(MAX_DEPTH):
        if getattr(type(dataset), "__getitems__", None) is not Subset.__getitems__:
            break
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None)) and not _one_by_one(dataset.__class__)


@cache
def _one_by_one(kind: Any) -> bool:
    """Whether its `__getitems__` asks `__getitem__` for each sample."""
    try:
        text = inspect.getsource(kind.__getitems__)
    except (AttributeError, OSError, TypeError):
        return False
    return ".__getitem__(" in text or "self[" in text
