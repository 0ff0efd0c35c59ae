"""Which backwards left something in an optimizer's gradients since these were zero, and what was stepped in between. First 24 steps only.

Event "scaled_step": site (of the step), opt, kind, scale, own (the step is torch's own): gradients whose last backward was of a loss from
GradScaler.scale, and neither unscale_ nor GradScaler.step has seen this optimizer since.
Event "mixed_step": site (of the zeroing), opt, parts [{site, caller, num, stepped}]: the backwards whose gradients this step uses, in
order, where another optimizer was stepped between two of them. `num`: how many of the parameters of the last one got something of it.
"""

from __future__ import annotations

from typing import Any

from .. import digests, marks, sites, zeroing
from ..patching import after
from ..state import S
from . import backward, precision, scales, steps

MAX_STEPS = 24
MAX_PARTS = 32


class Part:
    """What one backward (or several from one line, one after the other) left in the gradients of one optimizer."""

    __slots__ = ("caller", "scale", "serial", "site", "stepped", "touched")

    def __init__(self, serial: int, stack: list[sites.Site], scale: float, touched: frozenset[int]) -> None:
        self.serial, self.scale, self.touched = serial, scale, touched
        self.site = stack[0] if stack else sites.UNKNOWN
        self.caller = stack[1] if len(stack) > 1 else sites.UNKNOWN
        self.stepped: set[int] = set()  # optimizers that this backward gave gradients and that were stepped before the next one


class Held:
    """The gradients of one optimizer."""

    __slots__ = ("before", "parts", "site", "stale")

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.before: list[tuple[int, int]] = []  # identity and version of each gradient
        self.stale = False  # they were stepped on and have not been zero since
        self.site = sites.UNKNOWN  # last zero_grad()


_held: dict[int, Held] = {}  # by id of an optimizer that is alive (marks.table)
_serial = [0]


def _of(optimizer: Any) -> Held:
    return _held.setdefault(id(optimizer), Held())


def _versions(optimizer: Any) -> list[tuple[int, int]]:
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            grad = p.grad
            found.append((0, 0) if grad is None else (id(grad), grad._version))
    return found


def _is_zero(optimizer: Any, held: Held, versions: list[tuple[int, int]]) -> bool:
    """Whether the gradients are zero or None now. On a device: whether anybody has written to them since, which is taken for zeroing."""
    grads = [g for group in optimizer.param_groups for p in group["params"] if (g := p.grad) is not None]
    if any(not g.is_cpu for g in grads):
        return versions != held.before
    return not any(digests.plain(g) and digests.any_sampled(g) for g in zeroing.spread(grads, zeroing.LOOKED_AT))


def _enter(loss: Any) -> None:
    if S.steps >= MAX_STEPS or steps.under_way():
        return
    for optimizer in marks.optimizers():
        held, versions = _of(optimizer), _versions(optimizer)
        if _is_zero(optimizer, held, versions):
            held.parts, held.stale = [], False
        held.before = versions


def _leave(loss: Any) -> None:
    if S.steps >= MAX_STEPS or steps.under_way():
        return
    _serial[0] += 1
    stack, scale = sites.stack(3, 2), scales.scale_of(loss)
    for optimizer in marks.optimizers():
        held, versions = _of(optimizer), _versions(optimizer)
        touched = frozenset(i for i, (a, b) in enumerate(zip(held.before, versions, strict=False)) if a != b)
        held.before = versions
        if not touched:
            continue
        part = Part(_serial[0], stack, scale, touched)
        last = held.parts[-1] if held.parts else None
        if last is not None and not last.stepped and (last.site, last.caller) == (part.site, part.caller):
            last.serial, last.scale, last.touched = part.serial, scale, last.touched | touched
        elif len(held.parts) < MAX_PARTS:
            held.parts.append(part)


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if S.steps >= MAX_STEPS:
        return
    held = _held.get(id(optimizer))
    if held is None or not held.parts:
        return
    parts, last = held.parts, held.parts[-1]
    for other in marks.optimizers():
        if other is not optimizer and (theirs := _of(other).parts) and theirs[-1].serial == last.serial:
            theirs[-1].stepped.add(witness.opt)
    if last.scale not in (0.0, 1.0) and not precision.is_unscaled(optimizer):
        own = type(optimizer).__module__.startswith("torch.optim")
        S.recorder.event("scaled_step", sites.here(4), opt=witness.opt, kind=witness.kind, scale=last.scale, own=own)
    if not held.stale and len(parts) > 1 and any(p.stepped for p in parts):
        told = [
            {"site": sites.as_json(p.site), "caller": sites.as_json(p.caller), "num": len(p.touched & last.touched), "stepped": sorted(p.stepped)}
            for p in parts
        ]
        S.recorder.event("mixed_step", held.site, opt=witness.opt, parts=told)
    held.parts, held.stale = [], True


def _after_zero_grad(optimizer: Any) -> None:
    if S.steps < MAX_STEPS:
        _of(optimizer).site = sites.here(5)


def _after_module_zero_grad(result: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    if S.steps >= MAX_STEPS:
        return
    own = {id(p) for p in module.parameters()}
    for optimizer in marks.optimizers():
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"][:1]):
            _of(optimizer).site = sites.here(4)


def arm() -> None:
    import torch

    after(torch.nn.Module, "zero_grad", _after_module_zero_grad)
    backward.at_backward.append(_enter, MAX_STEPS)
    backward.at_left.append(_leave, MAX_STEPS)
    backward.at_zero_grad.append(_after_zero_grad, MAX_STEPS)
    steps.at_step.append(_at_step, MAX_STEPS)
