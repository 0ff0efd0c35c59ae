"""Dropout inside a frozen part of the model that the script put into eval mode, and an outer train() put back: what the part gives out is noise in part.

Event "frozen_noise" (once a part): site (the eval() of the part), train (the train() of a module around it), module, drops (layers that were called), steps
(in how many steps), frozen (see thawed.py, which follows the parts), grad (they were called with gradients on: features, not targets),
beside (a layer that is trained got the very tensor that the part did, as a student does: what the part gives is a target, likely, and not an input of it).
A hook on all forwards is there for the MAX_LOOKS steps after such a train(), and not once something is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import modulehooks, sites
from ..patching import quiet
from ..state import S
from . import steps, thawed

MAX_LOOKS, ENOUGH, MAX_TRAINED = 8, 4, 256
Key = tuple[int, int, Any]  # of a tensor: address, number of elements, dtype


@dataclass
class Seen:
    """Of one part."""

    part: thawed.Part
    inside: set[int]  # ids of its modules
    looks: int = 0
    noisy: int = 0  # steps
    grad: bool = False
    beside: bool = False


_seen: dict[int, Seen] = {}
_called: dict[int, bool] = {}  # id of a dropout layer in train mode -> whether gradients were on, since the last step
_given: dict[int, set[Key]] = {}  # key of a part -> the tensors that it was first called on, itself or a module inside
_trained: list[tuple[Any, set[Key]]] = []  # modules with trained parameters of their own, and what they were called on
_hooks: list[Any] = []


def _note(module: Any, args: Any) -> None:
    import torch

    grad = torch.is_grad_enabled()
    if module.training and isinstance(module, torch.nn.modules.dropout._DropoutNd):
        _called[id(module)] = _called.get(id(module), False) or grad
    if not grad:
        for key, seen in _seen.items():
            if key not in _given and seen.looks < MAX_LOOKS and id(module) in seen.inside and (keys := _keys(args)):
                _given[key] = keys
    elif len(_trained) < MAX_TRAINED and any(p is not None and p.requires_grad for p in module._parameters.values()) and (keys := _keys(args)):
        _trained.append((module, keys))


def _keys(args: Any) -> set[Key]:
    import torch

    try:
        return {(t.data_ptr(), t.numel(), t.dtype) for t in args if type(t) is torch.Tensor and t.numel()}
    except RuntimeError:  # one without memory of its own: sparse, or of vmap
        return set()


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if S.compiling:
        return
    for key, part in list(thawed._parts.items()):
        seen = _seen.get(key)
        if part.train is None or (seen is not None and seen.part is part and seen.looks >= MAX_LOOKS):
            continue
        if seen is None or seen.part is not part:
            module = part.module()
            seen = _seen[key] = Seen(part, {id(m) for m in module.modules()} if module is not None else set())
        _look(key, seen, witness)
    _forget()
    if not _hooks and any(s.looks < MAX_LOOKS for s in _seen.values()):
        import torch

        _hooks.append(torch.nn.modules.module.register_module_forward_pre_hook(quiet(_note)))


def _forget() -> None:
    _called.clear()
    _given.clear()
    _trained.clear()


def _look(key: int, seen: Seen, witness: Any) -> None:
    seen.looks += 1
    part, module = seen.part, seen.part.module()
    if module is None or not thawed.is_frozen(module) or not thawed.is_below(module, witness):
        seen.looks = MAX_LOOKS
        return
    hits = [id(m) for m in thawed.drops(module) if id(m) in _called]
    seen.noisy += bool(hits)
    seen.grad = seen.grad or any(_called[hit] for hit in hits)
    given = _given.get(key, set())
    seen.beside = seen.beside or any(keys & given and all(m is not module for m in other.modules()) for other, keys in _trained)
    if seen.noisy >= ENOUGH:
        seen.looks = MAX_LOOKS
        S.recorder.event(
            "frozen_noise", part.site, train=sites.as_json(part.train or sites.UNKNOWN), module=type(module).__name__, drops=len(hits), steps=seen.noisy,
            frozen=part.frozen, grad=seen.grad, beside=seen.beside,
        )  # fmt: skip


def _close(optimizer: Any) -> None:
    """Before a step's own look: where none is due any more, no forward is watched."""
    if all(s.looks >= MAX_LOOKS for s in _seen.values()) or not thawed._parts:
        modulehooks.remove(_hooks)
        _forget()


def arm() -> None:
    steps.at_step.append(_at_step, when=thawed._parts)
    steps.at_any_step.append(_close, when=_hooks)
