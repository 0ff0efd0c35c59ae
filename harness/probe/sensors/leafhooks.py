"""Hooks that the script registers on parameters: they see the rank's own gradient, before DDP averages it.

Event "leaf_hook" (`p.register_hook`; each call at the first NUM_STEPS steps, of the first MAX_HOOKS hooks): site (of the registration), key (how many
were registered before it), before, after (norm of the gradient that the hook was given, and of what it made of it), along (one number explains the
change), bound (what it cut every entry to that it changed; 0: no such cut), scale (the GradScaler's factor on the loss of this backward; 0: none),
known (the hook, or else the source, may use that factor).
Event "accumulated_hook" (`p.register_post_accumulate_grad_hook`): the same, of p.grad before and after the call.
What the hook returns is handed on as it is.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

from .. import digests, factoruse, hookedgrads, sites
from ..patching import quiet, wrap
from ..state import S
from . import backward, hookupdates, scales

NUM_STEPS = 8
MAX_HOOKS = 64
_num = [0]
_scale = [0.0]  # of the loss whose backward runs


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
    return grad.detach().clone() if grad is not None else None


def _note(kind: str, hook: Any, key: int, site: sites.Site, old: Any, result: Any) -> None:
    new = result.detach()
    before, after = float(old.norm()), float(new.norm())
    along = new.shape == old.shape and before > 0 and bool((new - old * (after / before)).norm() <= 1e-4 * after)
    scale = _scale[0]
    bound = _bound(old, new) if scale and math.isfinite(before) and new.shape == old.shape else 0.0
    known = bool(scale) and (factoruse.by_name(hook) or factoruse.anywhere())
    S.recorder.event(kind, site, key=key, before=before, after=after, along=along, bound=bound, scale=scale, known=known)


def _bound(old: Any, new: Any) -> float:
    """The larger of the two numbers, one above and one below zero, that every changed entry came to, and none is beyond."""
    cut, raised = new[new < old], new[new > old]
    one_cut = not cut.numel() or bool((cut == new.max()).all() and new.max() > 0)
    one_raised = not raised.numel() or bool((raised == new.min()).all() and new.min() < 0)
    if not (one_cut and one_raised):
        return 0.0
    return max(float(cut[0]) if cut.numel() else 0.0, -float(raised[0]) if raised.numel() else 0.0)


def _register(original: Any) -> Any:
    watched, copied, note, own = quiet(_watched), quiet(_copy), quiet(_note), quiet(hookedgrads.note)

    def register_hook(self: Any, hook: Any) -> Any:
        if not watched(self):
            return original(self, hook)
        key, site = _num[0], sites.here(2)
        _num[0] += 1

        @functools.wraps(hook)
        def looked_at(grad: Any) -> Any:
            old = copied(grad) if S.steps < NUM_STEPS else None
            own(self, grad)
            result = hook(grad)
            if old is not None:
                note("leaf_hook", hook, key, site, old, grad if result is None else result)
            return result

        return original(self, looked_at)

    return register_hook


def _register_accumulated(original: Any) -> Any:
    watched, copied, note, own = quiet(_watched), quiet(_copy), quiet(_note), quiet(hookedgrads.note)
    enter, leave = quiet(hookupdates.enter), quiet(hookupdates.leave)

    def register_post_accumulate_grad_hook(self: Any, hook: Any) -> Any:
        if not watched(self):
            return original(self, hook)
        key, site, callers = _num[0], sites.here(2), sites.stack(2)
        _num[0] += 1

        @functools.wraps(hook)
        def looked_at(param: Any) -> Any:
            old = copied(param.grad) if S.steps < NUM_STEPS and _scale[0] else None
            before = enter(param)
            own(param, param.grad)
            result = hook(param)
            if before is not None:
                leave(param, before, site, callers)
            if old is not None and param.grad is not None:
                note("accumulated_hook", hook, key, site, old, param.grad)
            return result

        return original(self, looked_at)

    return register_post_accumulate_grad_hook


def _enter(loss: Any) -> None:
    _scale[0] = scales.scale_of(loss)


def _left(loss: Any) -> None:
    _scale[0] = 0.0


def arm() -> None:
    import torch

    wrap(torch.Tensor, "register_hook", _register)
    wrap(torch.Tensor, "register_post_accumulate_grad_hook", _register_accumulated)
    backward.at_backward.append(_enter, NUM_STEPS)
    backward.at_left.append(_left, NUM_STEPS + 1)
