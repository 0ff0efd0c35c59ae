"""Caches of `functools.lru_cache` that keep tensors and that no call ever hits: asked only when memory has grown, about 1 ms then.

Tensors hash by identity: a cache on a function of tensors is filled by every call and finds none of them again.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

from . import cuts, sites

MIN_MISSES, MAX_NAMES = 8, 4000


def caches(num_steps: int) -> list[tuple[sites.Site, int]]:
    """(function that is cached, results that are kept) in modules and classes of the user's, where half of the steps and more left one."""
    found: dict[int, tuple[sites.Site, int]] = {}
    for thing in _named():
        if isinstance(thing, functools._lru_cache_wrapper):
            code, info = getattr(thing.__wrapped__, "__code__", None), thing.cache_info()
            fills = info.hits == 0 and info.maxsize is None and info.currsize >= max(MIN_MISSES, num_steps // 2)
            if code is not None and fills and sites.is_user_code(code) and _keeps_tensors(thing, info.currsize):
                found[id(thing)] = ((code.co_filename, code.co_firstlineno, code.co_name), info.currsize)
    return list(found.values())


def _named() -> list[Any]:
    """What stands in the user's modules, and in the classes there."""
    things = [thing for module in cuts.user_modules()[: cuts.MAX_FILES] for thing in list(vars(module).values())][:MAX_NAMES]
    return things + [inner for thing in things if isinstance(thing, type) for inner in list(vars(thing).values())]


def _keeps_tensors(cache: Any, size: int) -> bool:
    """Its first entry's result, or an argument of it, is a tensor."""
    own = next((d for d in gc.get_referents(cache) if type(d) is dict and d is not vars(cache) and len(d) >= size), None)
    first = next(iter(own.items()), None) if own else None
    if first is None:
        return False
    parts = [part for one in first for part in (one if isinstance(one, (tuple, list)) else (one,))]
    return any(hasattr(type(part), "data_ptr") for part in parts)
