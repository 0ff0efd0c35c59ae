"""Frozen batch normalisations whose part of the model the script put into eval mode, and an outer train() put back: their statistics move.

Event "frozen_moves" (once a part): site (the eval() of the part), train (the train() of a module around it), module, norms (how many of its
layers moved), steps (in how many steps), frozen (their parameters were frozen when eval() was called, or by the train() of the same function, with no step between).
A part is a module below a trained model. Looked at are 64 steps after such a train(). A part that goes to eval mode, or is called in it, without
gradients is evaluated, and is none, until the script freezes it and puts it into eval mode again, as it does with a teacher. Parts with
dropout alone are followed for noisyparts.py. Movement is told by the version of the count of batches, which waits for no device.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from .. import sites
from ..state import S
from . import modes, steps

MAX_PARTS, MAX_LOOKS, ENOUGH = 16, 64, 4


@dataclass
class Part:
    """A module that the script put into eval mode by itself."""

    module: weakref.ref[Any]
    site: sites.Site
    frozen: bool
    at_step: int
    train: sites.Site | None = None
    evaluated: bool = False
    looks: int = 0
    moved: int = 0
    below: bool | None = None
    norms: list[weakref.ref[Any]] = field(default_factory=list)
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)


_parts: dict[int, Part] = {}


def _norms(module: Any) -> list[Any]:
    """Batch normalisations with parameters of their own and running statistics."""
    import torch

    kind = torch.nn.modules.batchnorm._BatchNorm
    return [
        m for m in module.modules() if isinstance(m, kind) and m.weight is not None and m.num_batches_tracked is not None and m.momentum
    ]


def drops(module: Any) -> list[Any]:
    """Dropout layers that would do something in train mode."""
    import torch

    return [m for m in module.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p > 0]


def is_frozen(module: Any) -> bool:
    """All of it, and there is something."""
    params = list(module.parameters())
    return bool(params) and not any(p.requires_grad for p in params)


def _is_frozen(norm: Any) -> bool:
    return not norm.weight.requires_grad and (norm.bias is None or not norm.bias.requires_grad)


def note_switch(module: Any, mode: bool, site: sites.Site) -> None:
    """The script called train() or eval() of this module."""
    if mode:
        _parts.pop(id(module), None)
        if _parts:
            _put_back(module, site)
        return
    import torch

    part = _parts.get(id(module))
    if part is not None and part.evaluated and torch.is_grad_enabled() and part.module() is module and is_frozen(module):
        del _parts[id(module)]  # a teacher, trained and measured before: what it is from now on is another thing
        part = None
    if part is not None:
        part.train = None  # put back into eval mode: a train() of the script's own does so every time
        part.evaluated = part.evaluated or not torch.is_grad_enabled()
    elif len(_parts) < MAX_PARTS and ((norms := _norms(module)) or drops(module)):
        frozen = all(_is_frozen(m) for m in norms) if norms else is_frozen(module)
        _parts[id(module)] = Part(
            weakref.ref(module), site, frozen, S.steps, evaluated=not torch.is_grad_enabled(), norms=[weakref.ref(m) for m in norms]
        )


def _put_back(outer: Any, site: sites.Site) -> None:
    inside = {id(m) for m in outer.modules()}
    for key in [k for k in _parts if k in inside]:
        part = _parts[key]
        module = part.module()
        if module is None or part.evaluated:
            del _parts[key]
        else:
            norms = [m for ref in part.norms if (m := ref()) is not None]
            seen_together = part.site[::2] == site[::2]  # by one function: what hands out a part in eval mode may mean nothing by it
            frozen = all(_is_frozen(m) for m in norms) if norms else is_frozen(module)
            part.frozen = part.frozen or (seen_together and part.train is None and S.steps == part.at_step and frozen)
            part.train = part.train or site


def _at_eval_forward(module: Any) -> None:
    import torch

    part = _parts.get(id(module))
    if part is not None and part.train is None and not torch.is_grad_enabled():
        part.evaluated = True


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if not _parts or S.compiling:  # compiled: what was called in eval mode is not seen
        return
    for part in list(_parts.values()):
        if part.train is not None and part.looks < MAX_LOOKS:
            _look(part, witness)


def is_below(module: Any, witness: Any) -> bool:
    """Inside a model that this optimizer trains, and not all of it."""
    for ref in witness.roots:
        root = ref()
        whole = () if root is None else (root, vars(root)["_modules"].get("module"))
        if root is not None and all(module is not one for one in whole) and any(m is module for m in root.modules()):
            return True
    return False


def _look(part: Part, witness: Any) -> None:
    part.looks += 1
    module = part.module()
    norms = [m for ref in part.norms if (m := ref()) is not None and m.training and _is_frozen(m)]
    if module is None or not norms:
        return
    if part.below is None:
        part.below = is_below(module, witness)
    now = {id(m): (m.num_batches_tracked._version, m.weight._version) for m in norms}
    seen, part.seen = part.seen, now
    moved = [key for key, (mean, weight) in now.items() if key in seen and seen[key][0] != mean and seen[key][1] == weight]
    part.moved += bool(moved)
    if part.below and part.moved >= ENOUGH:
        part.looks = MAX_LOOKS
        S.recorder.event(
            "frozen_moves", part.site, train=sites.as_json(part.train or sites.UNKNOWN), module=type(module).__name__, norms=len(moved),
            steps=part.moved, frozen=part.frozen,
        )  # fmt: skip


def arm() -> None:
    modes.at_switch.append(note_switch)
    modes.at_eval_forward.append(_at_eval_forward)
    steps.at_step.append(_at_step, when=_parts)
