"""Hooks that the script registers on parameters (`p.register_hook`): they see the rank's own gradient, before DDP averages it.

Event "leaf_hook" (each call at the first NUM_STEPS steps, of the first MAX_HOOKS hooks): site (of the registration), key (how many were registered
before it), before, after (norm of the gradient that the hook was given, and of what it made of it), along (one number explains the change).
What the hook returns is handed on as it is.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from .. import digests, sites
from ..patching import quiet, wrap
from ..state import S

NUM_STEPS = 8
MAX_HOOKS = 64
_num = [0]


def _watched(param: Any) -> bool:
    return (
        _num[0] < MAX_HOOKS
        and S.steps < NUM_STEPS
        and type(param).__name__ == "Parameter"
        and param.is_leaf
        and digests.plain(param)
        and sites.is_user_code(sys._getframe(3).f_code)
    )


def _copy(grad: Any) -> Any:
    return grad.detach().clone()


def _note(key: int, site: sites.Site, old: Any, grad: Any, result: Any) -> None:
    new = (grad if result is None else result).detach()
    before, after = float(old.norm()), float(new.norm())
    along = new.shape == old.shape and before > 0 and bool((new - old * (after / before)).norm() <= 1e-4 * after)
    S.recorder.event("leaf_hook", site, key=key, before=before, after=after, along=along)


def _register(original: Any) -> Any:
    watched, copied, note = quiet(_watched), quiet(_copy), quiet(_note)

    def register_hook(self: Any, hook: Any) -> Any:
        if not watched(self):
            return original(self, hook)
        key, site = _num[0], sites.here(2)
        _num[0] += 1

        @functools.wraps(hook)
        def looked_at(grad: Any) -> Any:
            old = copied(grad) if S.steps < NUM_STEPS else None
            result = hook(grad)
            if old is not None:
                note(key, site, old, grad, result)
            return result

        return original(self, looked_at)

    return register_hook


def arm() -> None:
    import torch

    wrap(torch.Tensor, "register_hook", _register)
