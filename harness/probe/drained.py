"""Whether an iterator that a call is given has nothing left, told without drawing from it."""

from __future__ import annotations

import gc
from collections.abc import Sized
from types import GeneratorType
from typing import Any

DEPTH = 4  # a filter over a map over a generator


def nothing_in(given: Any) -> str:
    """ "used up": an iterator at its end; "empty": a list, tuple, set or dict view without an element; "": neither, or not known."""
    if _is_used_up(given, 0):
        return "used up"
    sized = isinstance(given, Sized) and not hasattr(type(given), "data_ptr")
    return "empty" if sized and len(given) == 0 else ""


def _is_used_up(given: Any, depth: int) -> bool:
    if isinstance(given, GeneratorType):
        return given.gi_frame is None
    if not isinstance(given, (filter, map)) or depth >= DEPTH:
        return False
    sources = [one for one in gc.get_referents(given) if hasattr(type(one), "__next__") or isinstance(one, tuple)]
    flat = [one for source in sources for one in (source if isinstance(source, tuple) else (source,))]  # map holds a tuple of them
    return any(_is_used_up(one, depth + 1) or _has_ended(one) for one in flat)


def _has_ended(iterator: Any) -> bool:
    """Iterators over lists, tuples and dicts say how much is left."""
    hint = getattr(type(iterator), "__length_hint__", None)
    return hint is not None and hint(iterator) == 0
