"""Live weights that one thread of the script hands to another (a checkpoint writer): what is handed over is remembered until it is saved.

`state_dict()` gives tensor objects of its own, which states.py knows; `{k: v.detach() for k, v in ...}` makes new ones of the same memory.
Writes no event itself (see "alias_used" in states.py). A statement that has handed over something else 32 times is not looked at any more.
"""

from __future__ import annotations

import sys
from typing import Any

from .. import digests, sites
from ..arm import on_import
from ..patching import before
from . import saving, states, steps

MAX_OTHER = 32
_other: dict[sites.Site, int] = {}


def _look(things: Any, site: sites.Site) -> None:
    if not site[0] or _other.get(site, 0) >= MAX_OTHER:
        return
    tensors = [t for _, t in saving.walk(things)]
    live = steps.weights() if tensors else set()
    mine = [t for t in tensors if digests.address(t) in live]
    if mine:
        states.keep(mine, site)
    elif len(_other) < 256:
        _other[site] = _other.get(site, 0) + 1


def _put(self: Any, item: Any = None, *args: Any, **kwargs: Any) -> None:
    if sites.is_user_code(sys._getframe(3).f_code):
        _look((item,), sites.here(4))


def _submit(self: Any, function: Any = None, *args: Any, **kwargs: Any) -> None:
    _look((args, kwargs), sites.here(4))


def _start(self: Any, *args: Any, **kwargs: Any) -> None:
    _look((getattr(self, "_args", ()), getattr(self, "_kwargs", {})), sites.here(4))


def _on_queue(module: Any) -> None:
    before(module.Queue, "put", _put)


def _on_pool(module: Any) -> None:
    before(module.ThreadPoolExecutor, "submit", _submit)


def _on_threading(module: Any) -> None:
    before(module.Thread, "start", _start)


def arm() -> None:
    on_import("queue", _on_queue)
    on_import("concurrent.futures.thread", _on_pool)
    on_import("threading", _on_threading)
