"""Objects that a function reaches without being given them: its closure, its bound self, and the globals its code names."""

from __future__ import annotations

from typing import Any


def values(function: Any) -> list[Any]:
    """At most 64 of them; nothing is called."""
    found: list[Any] = []
    bound = getattr(function, "__self__", None)
    if bound is not None:
        found.append(bound)
        function = getattr(function, "__func__", function)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            continue
    code, space = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is not None:
        found.extend(space[name] for name in code.co_names if name in space)
    return found[:64]


