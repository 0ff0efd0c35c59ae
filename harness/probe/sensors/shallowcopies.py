"""Modules that the script made by `copy.copy`: their children and parameters are the very objects of the original.

Event "shared_reference" (once a copy): site (the copy), called (the forward of the copy), module, num (parameters that both are trained by and read), steps.
Told where, in ENOUGH steps one after another, the copy is called without gradients on the inputs that the original is trained on, before the backward: not
once for several updates (what was likely before them), nor for a log behind them. Looked at are MAX_STEPS steps after a copy,
with a hook on all forwards, and none once something is compiled. Inputs on a device are read at the steps at which steps.py reads tensors too.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

from .. import digests, modulehooks, sites, variables
from ..patching import after, quiet
from ..state import S
from . import steps

MAX_COPIES, MAX_STEPS, ENOUGH, MAX_TENSORS, MAX_INPUTS = 16, 96, 4, 4, 16


@dataclass
class Copy:
    """One call of `copy.copy`."""

    ref: weakref.ref[Any]
    original: weakref.ref[Any]
    site: sites.Site
    ends: int  # step
    called: sites.Site = sites.UNKNOWN
    hits: int = 0
    own: set[int] = field(default_factory=set)  # digests of what it was called on without gradients, since the last step
    trained: set[int] = field(default_factory=set)  # and the original with them


_open: list[Copy] = []
_hooks: list[Any] = []
_num = [0]


def _note(result: Any, made: Any, *args: Any, **kwargs: Any) -> None:
    original, site = _copied()
    if original is None or S.compiling or _num[0] >= MAX_COPIES:
        return
    _num[0] += 1
    _open.append(Copy(weakref.ref(made), weakref.ref(original), site, S.steps + MAX_STEPS))
    if not _hooks:
        import torch

        _hooks.append(torch.nn.modules.module.register_module_forward_hook(quiet(_called), with_kwargs=True))


def _copied() -> tuple[Any, sites.Site]:
    """What copy.copy was called on by the script; None of anything else that makes a module from a state."""
    frame: Any = sys._getframe(1)
    for _ in range(10):
        if frame is None or frame.f_code.co_name == "_reconstruct":
            break
        frame = frame.f_back
    else:
        return None, sites.UNKNOWN
    if frame is None or frame.f_globals.get("__name__") != "copy":
        return None, sites.UNKNOWN
    held = frame.f_locals
    original, deep = held.get("x"), held.get("deep", True)
    variables.let_go(frame, held)
    user = frame.f_back.f_back if frame.f_back is not None else None
    if deep or user is None or not sites.is_user_code(user.f_code):
        return None, sites.UNKNOWN
    return original, sites.of_frame(user)


def _called(module: Any, args: Any, kwargs: Any, output: Any) -> None:
    import torch

    for one in _open:
        of_copy = one.ref() is module
        if (of_copy or one.original() is module) and of_copy != torch.is_grad_enabled() and not (of_copy and S.since.num_backward):
            into = one.own if of_copy else one.trained
            tensors = digests.of_batch((args, kwargs))[:MAX_TENSORS]
            if tensors and len(into) < MAX_INPUTS and (all(t.is_cpu for t in tensors) or S.steps < steps.DEVICE_EVERY or S.steps % steps.DEVICE_EVERY == 0):
                into.add(digests.of_tensors(tensors, lasting=False)[0])
                if of_copy and one.called is sites.UNKNOWN:
                    one.called = sites.here(3)


def _at_step(optimizer: Any) -> None:
    for one in list(_open):
        one.hits = one.hits + 1 if one.own & one.trained else 0 if one.trained else one.hits
        one.own.clear()
        one.trained.clear()
        if one.hits >= ENOUGH or S.steps >= one.ends or one.ref() is None or one.original() is None:
            _open.remove(one)
            if one.hits >= ENOUGH and (num := _num_shared(one)):
                S.recorder.event(
                    "shared_reference", one.site, called=sites.as_json(one.called), module=type(one.ref()).__name__, num=num, steps=one.hits
                )  # fmt: skip
    if not _open:
        modulehooks.remove(_hooks)


def _num_shared(one: Copy) -> int:
    """How many parameters of the original an optimizer trains, all of which the copy has too; 0 where it lacks one."""
    made, original = one.ref(), one.original()
    if made is None or original is None:
        return 0
    held = {i for w in list(steps._known.values()) for i in w.ids}
    trained = {id(p) for p in original.parameters() if p.requires_grad and id(p) in held}
    return len(trained) if trained <= {id(p) for p in made.parameters()} else 0


def arm() -> None:
    import torch

    after(torch.nn.Module, "__setstate__", _note)
    steps.at_any_step.append(_at_step, when=_open)
