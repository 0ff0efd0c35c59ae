"""What a function reaches without being given it: its closure, its bound self, the globals its code names, what partial() holds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from . import sites

MAX_VISITED = 400
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType)


def values(function: Any) -> list[Any]:
    """At most 64 of them; nothing is called."""
    found: list[Any] = []
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()][:64]
    if isinstance(function, MethodType):
        found.append(function.__self__)
        function = function.__func__
    if not isinstance(function, FunctionType):
        return found
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            continue
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    found.extend(function.__globals__[name] for name in names)
    return found[:64]


def reach(roots: list[Any], stop: type, depth: int = 4) -> Iterator[Any]:
    """Everything in reach of `roots` through containers, attributes and the user's own functions; instances of `stop` are not entered.

    Reads `__dict__` only, so that no property and no descriptor of the user's runs. Bounded: 400 objects, `depth` hops.
    """
    seen: set[int] = set()
    todo = [(root, depth) for root in roots]
    while todo and len(seen) < MAX_VISITED:
        thing, left = todo.pop(0)
        if isinstance(thing, _PLAIN) or id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing
        if left and not isinstance(thing, stop):
            todo.extend((child, left - 1) for child in _children(thing))


def _children(thing: Any) -> list[Any]:
    if isinstance(thing, (list, tuple, set, frozenset)):
        return list(thing)[:64]
    if isinstance(thing, dict):
        return list(thing.values())[:64]
    if isinstance(thing, (functools.partial, MethodType)):
        return values(thing)
    if isinstance(thing, FunctionType):
        return values(thing) if sites.is_user_code(thing.__code__) else []
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return []
    return list(found.values())[:64] if isinstance(found, dict) and not isinstance(thing, type) else []
