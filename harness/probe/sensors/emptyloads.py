"""torch.distributed.checkpoint reads into what it is given: of an optimizer that has not stepped yet it is given no state, and reads none.

Event "unfilled_optimizer" (once a load and optimizer, at the second step after it): site (of the load), kind, entry (its name in the checkpoint), path,
held (tensors of its state in the checkpoint), moments (their names, first 8), loaded_at (step): the optimizer stepped without any state.
Told apart by that second step: `torch.distributed.checkpoint.state_dict` makes a step of its own in an optimizer without state, and loads then.
Weak references only.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

from .. import sites
from ..arm import on_import
from ..patching import after, before
from ..state import S
from . import steps

MAX_READ, MAX_WAITING, MAX_DEPTH, MAX_NAMES = 16, 16, 3, 8
_read: dict[int, weakref.ref[Any]] = {}  # id of the groups in a state dict without state -> the optimizer that gave it out
_waiting: list[Unfilled] = []


class Unfilled:
    """An optimizer to which a checkpoint that holds its state gave none."""

    def __init__(self, ref: weakref.ref[Any], told: dict[str, Any]) -> None:
        self.ref, self.site, self.told, self.began = ref, sites.here(2), told, False


def _after_state_dict(result: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(result, dict) and not result.get("state") and not _filled(optimizer) and result.get("param_groups"):
        if len(_read) >= MAX_READ:
            del _read[next(iter(_read))]
        _read[id(result["param_groups"])] = weakref.ref(optimizer)


def _filled(optimizer: Any) -> bool:
    return any(optimizer.state.values())


def _at_plan(planner: Any, state_dict: Any, metadata: Any = None, *args: Any, **kwargs: Any) -> None:
    """What is wanted, and what the checkpoint has."""
    inside = getattr(metadata, "state_dict_metadata", None)
    if not _read or not inside or not isinstance(state_dict, dict):
        return
    for entry, ref in list(_asked_for(state_dict)):
        held = [k for k, v in inside.items() if k.startswith(f"{entry}.state.") and math.prod(getattr(v, "size", (1,))) > 1]
        optimizer = ref()
        if held and optimizer is not None and not _filled(optimizer) and len(_waiting) < MAX_WAITING:
            path = str(getattr(getattr(metadata, "storage_meta", None), "checkpoint_id", None) or "")
            moments = sorted({k.rsplit(".", 1)[-1] for k in held})[:MAX_NAMES]
            told = {"kind": type(optimizer).__name__, "entry": entry, "path": path, "held": len(held), "moments": moments, "loaded_at": S.steps}
            _waiting[:] = [one for one in _waiting if one.ref() not in (None, optimizer)]
            _waiting.append(Unfilled(ref, told))


def _asked_for(thing: dict[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, weakref.ref[Any]]]:
    """(name in the checkpoint, optimizer) of state dicts without state in what is to be read."""
    for key, value in thing.items():
        if not isinstance(value, dict):
            continue
        ref = _read.get(id(value.get("param_groups")))
        if ref is not None and not value.get("state"):
            yield f"{prefix}{key}", ref
        elif depth < MAX_DEPTH and "param_groups" not in value:
            yield from _asked_for(value, f"{prefix}{key}.", depth + 1)


def _before_load(optimizer: Any, state_dict: Any, *args: Any, **kwargs: Any) -> None:
    if _waiting and isinstance(state_dict, dict) and state_dict.get("state"):
        _waiting[:] = [one for one in _waiting if one.ref() not in (None, optimizer)]


def _at_step(optimizer: Any) -> None:
    for one in list(_waiting):
        if one.ref() is not optimizer:
            continue
        if one.began:
            S.recorder.event("unfilled_optimizer", one.site, **one.told)
        if one.began or _filled(optimizer):
            _waiting.remove(one)
        one.began = True


def _arm_planner(module: Any) -> None:
    before(module.DefaultLoadPlanner, "set_up_planner", _at_plan)


def arm() -> None:
    import torch

    after(torch.optim.Optimizer, "state_dict", _after_state_dict)
    before(torch.optim.Optimizer, "load_state_dict", _before_load)
    on_import("torch.distributed.checkpoint.default_planner", _arm_planner)
    steps.at_any_step.append(_at_step, when=_waiting)
