"""Gradients that are computed on a copy of the model and lent to the optimizer's parameters, and that are still there at the next backward.

Event "lent_kept" (once): site (of the backward), num, of (gradients of the copy), opt, zeroed (the last zero_grad() of an optimizer, which had
other gradients). Seen at MIN_TIMES steps in a row: a gradient of a parameter that is in no optimizer holds, at the first backward after a step
and not zero, bit by bit what that step was taken with. First 24 steps only, and only where reached.py has found that a loss reaches no
parameter of an optimizer; on the CPU.
"""

from __future__ import annotations

from typing import Any

from .. import digests, sites
from ..patching import contained
from ..state import S
from . import backward, reached, steps

MAX_STEPS, MIN_TIMES, MAX_LOOKED_AT = 24, 3, 400
_stepped: list[Any] = []  # step, optimizer, digests of its gradients
_zeroed: list[sites.Site] = []
_times = [0]
_told = [False]


def _grads(params: list[Any]) -> list[Any]:
    return [p.grad for p in params if p is not None and p.grad is not None and p.grad.is_cpu and digests.plain(p.grad)][:MAX_LOOKED_AT]


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if reached.unheld and S.steps < MAX_STEPS and not _told[0]:
        _stepped[:] = [S.steps, witness.opt, set(digests.of_tensors(_grads(params))[1])]


@contained
def _enter(loss: Any) -> None:
    """Before a backward: whether the copy's gradients are those of the step before."""
    if not _stepped or _told[0] or S.steps != _stepped[0] + 1:
        return
    grads = _grads([ref() for ref in reached.unheld])
    some = [digests.any_sampled(g) for g in grads]
    kept = sum(here and digest in _stepped[2] for here, digest in zip(some, digests.of_tensors(grads)[1], strict=True))
    _times[0] = _times[0] + 1 if 2 * kept > len(grads) > 0 else 0
    if _times[0] >= MIN_TIMES:
        _told[0] = True
        zeroed = sites.as_json(_zeroed[-1]) if _zeroed else None
        S.recorder.event("lent_kept", sites.here(4), num=kept, of=len(grads), opt=_stepped[1], zeroed=zeroed)
    _stepped.clear()


def _after_zero_grad(optimizer: Any) -> None:
    if reached.unheld and not _told[0]:
        _zeroed[:] = [sites.here(5)]


def arm() -> None:
    backward.at_backward.append(_enter, MAX_STEPS + 1)
    backward.at_zero_grad.append(_after_zero_grad, MAX_STEPS + 1)
    steps.at_step.append(_at_step, MAX_STEPS)

