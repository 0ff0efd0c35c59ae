"""Dropout inside a frozen part of the model that the script put into eval mode, and an outer train() put back: what the part gives out is noise in part.

Event "frozen_noise" (once a part): site (the eval() of the part), train (the train() of a module around it), module, drops (layers that were called), steps
(in how many steps), frozen (see thawed.py, which follows the parts), grad (they were called with gradients on: features, not targets).
A hook on all forwards is there for the MAX_LOOKS steps after such a train(), and not once something is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import modulehooks, sites
from ..patching import quiet
from ..state import S
from . import steps, thawed

MAX_LOOKS, ENOUGH = 8, 4


@dataclass
class Seen:
    """Of one part."""

    part: thawed.Part
    looks: int = 0
    noisy: int = 0  # steps
    grad: bool = False


_seen: dict[int, Seen] = {}
_called: dict[int, bool] = {}  # id of a dropout layer in train mode -> whether gradients were on, since the last step
_hooks: list[Any] = []


def _note(module: Any, args: Any) -> None:
    import torch

    if module.training and isinstance(module, torch.nn.modules.dropout._DropoutNd):
        _called[id(module)] = _called.get(id(module), False) or torch.is_grad_enabled()


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if S.compiling:
        return
    for key, part in list(thawed._parts.items()):
        seen = _seen.get(key)
        if part.train is None or (seen is not None and seen.part is part and seen.looks >= MAX_LOOKS):
            continue
        if seen is None or seen.part is not part:
            seen = _seen[key] = Seen(part)
        _look(seen, witness)
    _called.clear()
    if not _hooks and any(s.looks < MAX_LOOKS for s in _seen.values()):
        import torch

        _hooks.append(torch.nn.modules.module.register_module_forward_pre_hook(quiet(_note)))


def _look(seen: Seen, witness: Any) -> None:
    seen.looks += 1
    part, module = seen.part, seen.part.module()
    if module is None or not thawed.is_frozen(module) or not thawed.is_below(module, witness):
        seen.looks = MAX_LOOKS
        return
    hits = [id(m) for m in thawed.drops(module) if id(m) in _called]
    seen.noisy += bool(hits)
    seen.grad = seen.grad or any(_called[key] for key in hits)
    if seen.noisy >= ENOUGH:
        seen.looks = MAX_LOOKS
        S.recorder.event(
            "frozen_noise", part.site, train=sites.as_json(part.train or sites.UNKNOWN), module=type(module).__name__, drops=len(hits), steps=seen.noisy,
            frozen=part.frozen, grad=seen.grad,
        )  # fmt: skip


def _close(optimizer: Any) -> None:
    """Before a step's own look: where none is due any more, no forward is watched."""
    if all(s.looks >= MAX_LOOKS for s in _seen.values()) or not thawed._parts:
        modulehooks.remove(_hooks)


def arm() -> None:
    steps.at_step.append(_at_step, when=thawed._parts)
    steps.at_any_step.append(_close, when=_hooks)
