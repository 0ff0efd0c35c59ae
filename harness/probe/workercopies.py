"""Plain attributes of a data set of which persistent workers hold, and read, another value than the main process: changed after they were started.

Compared at each `iter(loader)`: with how it was at the first one, when the workers were made. Looked at are numbers, texts and small collections
of them, of the data set, of the object that collates, and of what these hold and use there (a transform, the data set of a Subset).
"""

from __future__ import annotations

import weakref
from typing import Any

from . import copyreads, sites

ENTRIES = frozenset({"__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "forward"})
PASSED_ON = ("dataset", "datasets", "transform", "transforms")  # what torch's own wrappers (Subset, ConcatDataset, Compose) hold
MAX_DEPTH, MAX_OBJECTS, MAX_NAMES, MAX_ENTRIES = 4, 24, 60, 32
Values = dict[tuple[int, str], tuple[str, str]]  # (id of the object, name) -> (the name as the script would write it, value)
_started: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], Values]] = weakref.WeakKeyDictionary()


def told(loader: Any) -> list[dict[str, Any]]:
    """name, then, now, read (site), firm (it is read whichever way the code goes), of what the workers of this loader read in an old copy."""
    workers = tuple(w.pid or 0 for w in getattr(getattr(loader, "_iterator", None), "_workers", ()))
    if not workers or not getattr(loader, "persistent_workers", False):
        return []
    objects = _objects(loader)
    values = {key: value for thing, path, _ in objects for key, value in _plain(thing, path).items()}
    known = _started.get(loader)
    if known is None or known[0] != workers:
        _started[loader] = (workers, values)
        return []
    changed = {key for key, value in values.items() if key in known[1] and known[1][key][1] not in (value[1], "None")}
    return [found for thing, path, entries in objects if (found := _read(thing, path, entries, changed, known[1], values))] if changed else []


def _read(thing: Any, path: str, entries: frozenset[str], changed: set[tuple[int, str]], then: Values, now: Values) -> dict[str, Any] | None:
    """The first changed attribute of an object, or of what it holds, that its code in the workers reads."""
    if not any(key[0] == id(thing) or key[0] in {id(v) for v in vars(thing).values()} for key in changed) or not _users(type(thing)):
        return None
    reads = copyreads.of(type(thing), entries)
    for names, site in reads.at.items():
        owner = thing if len(names) == 1 else vars(thing).get(names[0])
        key = (id(owner), names[-1])
        fills = reads.own if len(names) == 1 else reads.own | _own(owner)
        filled_elsewhere = now.get(key, ("", ""))[1][:1] in ("[", "{") and names in reads.handed_on
        if key in changed and not filled_elsewhere and not fills.intersection(names):
            return {
                "name": f"{path}.{'.'.join(names)}".lstrip("."), "then": then[key][1], "now": now[key][1], "read": sites.as_json(site),
                "firm": names in reads.firm,
            }  # fmt: skip
    return None


def _own(held: Any) -> set[str]:
    return copyreads.of(type(held), ENTRIES).own if _users(type(held)) else set()


def _objects(loader: Any) -> list[tuple[Any, str, frozenset[str]]]:
    """(object, how the data set reaches it, its methods that run in a worker), outermost first."""
    collate = getattr(loader, "collate_fn", None)
    todo: list[tuple[Any, str, frozenset[str], int]] = [(loader.dataset, "", ENTRIES, 0)]
    bound = getattr(collate, "__self__", None)
    todo.append((collate if bound is None else bound, "", frozenset({"__call__" if bound is None else collate.__name__}), 0))  # type: ignore[union-attr]
    found: list[tuple[Any, str, frozenset[str]]] = []
    seen: set[int] = set()
    while todo and len(found) < MAX_OBJECTS:
        thing, path, entries, depth = todo.pop(0)
        if id(thing) in seen or not hasattr(thing, "__dict__") or isinstance(thing, type):
            continue
        seen.add(id(thing))
        found.append((thing, path, entries))
        if depth < MAX_DEPTH:
            todo.extend((held, f"{path}.{name}".lstrip("."), used, depth + 1) for name, held, used in _held(thing, entries))
    return found


def _held(thing: Any, entries: frozenset[str]) -> list[tuple[str, Any, frozenset[str]]]:
    """What an object holds and uses in a worker: (name, object, methods)."""
    if not _users(type(thing)):
        parts = [(name, vars(thing).get(name)) for name in PASSED_ON]
        return [(name, each, ENTRIES) for name, held in parts for each in (held if isinstance(held, (list, tuple)) else [held])[:8]]
    used = copyreads.of(type(thing), entries).called
    held_here = [(name, vars(thing)[name]) for name in used if name in vars(thing)]
    return [(name, held, ENTRIES | used[name]) for name, held in held_here if _users(type(held)) or type(held).__module__.startswith("torch")]


def _users(kind: type) -> bool:
    return any(sites.is_user_code(c) for f in vars(kind).values() if (c := getattr(f, "__code__", None)) is not None)


def _plain(thing: Any, path: str) -> Values:
    return {(id(thing), name): (path, repr(v)[:400]) for name, v in list(vars(thing).items())[:MAX_NAMES] if _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= MAX_ENTRIES and all(type(v) in (bool, int, float, str) for pair in value.items() for v in pair)
    if type(value) in (list, tuple):
        return len(value) <= MAX_ENTRIES and all(type(v) in (bool, int, float, str) for v in value)
    return value is None or type(value) in (bool, int, float, str)
