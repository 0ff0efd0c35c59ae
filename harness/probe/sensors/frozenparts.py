"""Frozen parameters inside a model that DDP wraps: it sent them to all ranks when it wrapped the model, and never again.

Event "frozen_state" (at the first step of a wrap, and where they are others than at the last look; MAX_TOLD a wrap): index, digest, num, moved ({name: digest}
of those that are away from the first look by more than rounding, of MAX_VALUES that are looked at so), site (where the source writes to such a one).
Event "frozen_used" (behind one with `moved`): index, names; a forward of the wrapped model in train mode calls the modules that hold these.
Looked at are one step in EVERY, later one in LATER, a microsecond a tensor; those that an optimizer holds are not: the rows tell of them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from .. import cuts, digests, modulehooks, paramwrites
from ..patching import quiet
from ..state import S
from . import ddp, steps

EVERY, LATER, MANY = 16, 256, 256
MAX_TOLD, MAX_VALUES, MAX_WAITED, MIN_ELEMENTS = 32, 64, 8, 16
ROUNDINGS = {4: 256, 2: 32}  # by width of an element: what adding a change and taking it out again may leave, in roundings of the largest value


@dataclass
class Frozen:
    """Of one wrap."""

    wrapped: Any
    names: list[str] = field(default_factory=list)
    refs: list[weakref.ref[Any]] = field(default_factory=list)
    first: dict[int, Any] = field(default_factory=dict)  # position -> sampled values at the first look
    digest: int = 0
    told: int = 0
    owners: dict[int, set[str]] = field(default_factory=dict)  # id of a module that holds what has moved -> names, while forwards are watched
    waited: int = 0
    inside: bool = False
    called: set[str] = field(default_factory=set)
    told_used: set[str] = field(default_factory=set)


_open: list[Frozen] = []
_watched: list[Frozen] = []
_hooks: list[Any] = []


def _at_wrap(wrapped: ddp.Wrapped) -> None:
    if any(not grad for grad in wrapped.grad.values()):
        _open.append(Frozen(wrapped))


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    step = S.steps
    for one in list(_open):
        if one.told == 0 or step % (EVERY if step < MANY else LATER) == 0:
            _look(one, witness)


def _look(one: Frozen, witness: Any) -> None:
    if steps._is_blind(witness):
        return
    found = _take(one) if not one.told else [p for ref in one.refs if (p := ref()) is not None]
    if not found or len(found) < len(one.refs) or one.wrapped.ref() is None or one.told >= MAX_TOLD or any(p.requires_grad for p in found):
        _open.remove(one)
        return
    digest, each = digests.of_tensors(found)
    if digest == one.digest:
        return
    moved = [at for at, old in one.first.items() if _is_moved(old, _values(found[at]))]
    if not one.told:
        stride = -(-len(found) // MAX_VALUES)
        one.first = {at: _values(p) for at, p in enumerate(found) if at % stride == 0}
    one.digest, one.told = digest, one.told + 1
    names = {one.names[at]: each[at] for at in moved}
    site = next((s for n in list(names)[:1] for f in cuts.user_files()[: cuts.MAX_FILES] if (s := paramwrites.place(f, n)) is not None), None)
    S.recorder.event("frozen_state", site, index=one.wrapped.index, digest=digest, num=len(found), moved=names)
    if names.keys() - one.told_used:
        _watch(one, {id(found[at]): one.names[at] for at in moved})


def _take(one: Frozen) -> list[Any]:
    held = {i for w in list(steps._known.values()) for i in w.ids}
    w = one.wrapped
    for key, ref in w.refs.items():
        p = ref()
        if p is None or w.grad[key] or w.names[key] in w.ignored or key in held or not digests.plain(p):
            continue
        if p.is_floating_point() and p.numel() >= MIN_ELEMENTS:
            one.names.append(w.names[key])
            one.refs.append(ref)
    return [p for ref in one.refs if (p := ref()) is not None]


def _values(param: Any) -> Any:
    return digests.sampled(param.detach()).cpu().clone()


def _is_moved(old: Any, now: Any) -> bool:
    import torch

    if old.shape != now.shape:
        return True
    old, now, dtype = old.float(), now.float(), old.dtype
    most = max(float(old.abs().max()), float(now.abs().max()), 1e-12)
    return float((now - old).abs().max()) > most * torch.finfo(dtype).eps * ROUNDINGS.get(dtype.itemsize, 256)


def _watch(one: Frozen, moved: dict[int, str]) -> None:
    import torch

    model = one.wrapped.ref()
    if model is None or S.compiling:
        return
    held = {id(m): {moved[id(p)] for p in vars(m)["_parameters"].values() if id(p) in moved} for m in model.modules()}
    one.owners = {key: names for key, names in held.items() if names}
    one.waited, one.inside = 0, False
    if one not in _watched:
        _watched.append(one)
    if not _hooks:
        _hooks.append(torch.nn.modules.module.register_module_forward_pre_hook(quiet(_entered)))
        _hooks.append(torch.nn.modules.module.register_module_forward_hook(quiet(_left)))


def _entered(module: Any, args: Any) -> None:
    for one in _watched:
        if one.wrapped.ref() is module:
            one.inside = module.training
        elif one.inside and (names := one.owners.get(id(module))) is not None:
            one.called |= names


def _left(module: Any, args: Any, output: Any) -> None:
    for one in _watched:
        if one.wrapped.ref() is module:
            one.inside = False
            one.waited = MAX_WAITED


def _close(optimizer: Any) -> None:
    """Until the wrapped model was called, or another one's steps came in between."""
    for one in list(_watched):
        one.waited += 1
        if one.waited >= MAX_WAITED:
            _watched.remove(one)
            if fresh := sorted(one.called - one.told_used):
                one.told_used.update(fresh)
                S.recorder.event("frozen_used", index=one.wrapped.index, names=fresh)
    if not _watched:
        modulehooks.remove(_hooks)


def arm() -> None:
    ddp.at_wrap.append(_at_wrap)
    steps.at_step.append(_at_step, when=_open)
    steps.at_any_step.append(_close, when=_watched)
