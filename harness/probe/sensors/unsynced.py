"""Optimizer steps while FSDP2 is told not to reduce gradients: those that the backwards left are whole and wait, and the step has no part of them.

Event "unsynced_step" (the first MAX_TOLD): site (the set_requires_gradient_sync), opt, num (parameters of this optimizer whose gradients wait), none (of
these, those that have no other gradient), names. Looked at are steps at which the last call of set_requires_gradient_sync said False, and no others.
"""

from __future__ import annotations

import weakref
from typing import Any

from .. import fullyshard, sites
from ..arm import on_import
from ..patching import before
from ..state import S
from . import steps

MAX_TOLD = 16
_off: dict[int, tuple[weakref.ref[Any], sites.Site]] = {}  # id of a module that was told so last
_told = [0]


def _note(module: Any, requires_gradient_sync: bool, *args: Any, **kwargs: Any) -> None:
    if requires_gradient_sync or _told[0] >= MAX_TOLD:
        _off.pop(id(module), None)
    elif id(module) not in _off:
        _off[id(module)] = weakref.ref(module), sites.here(4)


def _at_step(optimizer: Any) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, (ref, site) in list(_off.items()):
        module = ref()
        if module is None or _told[0] >= MAX_TOLD:
            del _off[key]
            continue
        waiting = [(name, shard) for name, shard, _ in fullyshard.waiting(module, list(module.modules())) if id(shard) in held]
        if waiting:
            _told[0] += 1
            none = sum(shard.grad is None for _, shard in waiting)
            opt = steps.witness_of(optimizer).opt
            S.recorder.event("unsynced_step", site, opt=opt, num=len(waiting), none=none, names=[n for n, _ in waiting[:5]])


def _arm(module: Any) -> None:
    if hasattr(module, "FSDPModule"):
        before(module.FSDPModule, "set_requires_gradient_sync", _note)


def arm() -> None:
    on_import("torch.distributed.fsdp", _arm)
    steps.at_any_step.append(_at_step, when=_off)
