"""Gradients that are multiplied between two backwards of one optimizer step, before the second is added to them.

Looked at in the first NUM_STEPS steps, by samples of the first two gradients of an optimizer that no longer agree with those of the backward before.
Event "rescaled" (a step, where some factor is not 1): site (the first statement of the script that writes gradients, where its source has one), opt,
factors (one for each time that a backward came behind it and was added; None: no one number), last (between the last backward and the step).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from .. import cuts, digests, factors, marks, sites, sources
from ..patching import contained
from ..state import S
from . import backward, steps

NUM_STEPS, MAX_TENSORS, NUM_VALUES, CLOSE = 6, 2, 24, 1e-4


@dataclass
class Window:
    """Of one optimizer, from step to step."""

    params: list[weakref.ref[Any]] = field(default_factory=list)
    left: list[float] = field(default_factory=list)  # behind the last backward
    entered: list[float] = field(default_factory=list)  # before the one that runs
    factors: list[float | None] = field(default_factory=list)

    def values(self) -> list[float]:
        held = [p.grad for ref in self.params if (p := ref()) is not None]
        return [float(v) for g in held if g is not None and digests.plain(g) for v in digests.sampled(g.detach(), NUM_VALUES).tolist()]


_open: dict[int, Window] = {}  # by id of an optimizer that has not stepped since its first backward


def _graded(optimizer: Any) -> list[weakref.ref[Any]]:
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and digests.plain(p.grad)]
    return [weakref.ref(p) for p in params[:MAX_TENSORS] if p.grad.is_floating_point()]


@contained
def _enter(loss: Any) -> None:
    for window in _open.values():
        window.entered = window.values()


@contained
def _left(loss: Any) -> None:
    for optimizer in marks.optimizers():
        window = _open.get(id(optimizer))
        if window is None:
            if params := _graded(optimizer):
                window = _open[id(optimizer)] = Window(params)
                window.left = window.values()
            continue
        now = window.values()
        if now != window.entered:
            window.factors.append(factors.factor(window.left, window.entered, CLOSE))
            window.left = now
        elif window.left != window.entered:
            window.left = window.entered  # a backward of something else came between


@contained
def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    window = _open.pop(id(optimizer), None)
    if window is None or not any(f is not None and abs(f - 1) > CLOSE for f in window.factors):
        return
    last = factors.factor(window.left, window.values(), CLOSE)
    files = cuts.user_files()[: cuts.MAX_FILES]
    site = next((s for f in files for s in sources.gradient_writes(f)), S.loss_site)
    S.recorder.event("rescaled", site or sites.UNKNOWN, opt=witness.opt, factors=window.factors, last=last)


def arm() -> None:
    backward.at_backward.append(_enter, NUM_STEPS, when=_open)
    backward.at_left.append(_left, NUM_STEPS)
    steps.at_step.append(_at_step, NUM_STEPS, when=_open)
