"""Hooks of modules and tensors that the user's code registers again and again.

Event "hooks" (at 4, 8, 16, ... of one place): num (hooks from this statement that stand on the same module or tensor now), steps (in how many
different steps they were registered), site.
"""

from __future__ import annotations

import sys
from typing import Any

from .. import sites
from ..patching import after
from ..state import S

FIRST = 4
REMEMBERED = 512  # registrations a statement
_made: dict[sites.Site, list[tuple[Any, int, int]]] = {}  # -> (weak reference to the dict of hooks, key in it, step)
_told: dict[sites.Site, int] = {}


def _after_handle(result: Any, handle: Any, hooks: Any, *args: Any, **kwargs: Any) -> None:
    if not S.steps:
        return
    frame = sys._getframe(4)  # guarded, wrapper, register_*_hook, its caller
    frame = frame.f_back if sites.is_ours(frame.f_code.co_filename) and frame.f_back is not None else frame  # the wrapper of leafhooks.py
    if not sites.is_user_code(frame.f_code) or len(_made) > REMEMBERED:
        return
    site = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    made = _made.setdefault(site, [])
    made.append((handle.hooks_dict_ref, handle.id, S.steps))
    del made[:-REMEMBERED]
    # the newest hook enters the dict after this call: it counts as standing
    standing = [step for ref, key, step in made if (found := ref()) is hooks and (key in found or key == handle.id)]
    if len(standing) >= max(FIRST, 2 * _told.get(site, 0)):
        _told[site] = len(standing)
        S.recorder.event("hooks", site, num=len(standing), steps=len(set(standing)))


def arm() -> None:
    from torch.utils.hooks import RemovableHandle

    after(RemovableHandle, "__init__", _after_handle)
