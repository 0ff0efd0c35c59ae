"""Backwards whose gradients wait in an optimizer that has not been stepped yet.

Event "not_stepped" (backward 8, 16, ... 256, until the first step of any optimizer): site (of the backward), made (where the optimizer was
made), kind, backwards (so far), graded (parameters of it that have a gradient), at (the condition around the step behind that backward, or
the step).
"""

from __future__ import annotations

from typing import Any

from .. import marks, sites, sources
from ..patching import contained
from ..state import S
from . import backward, steps

LOOKS = frozenset((8, 16, 32, 64, 128, 256))


@contained
def look(loss: Any) -> None:
    if S.steps or S.backwards not in LOOKS:
        return
    at = sources.step_condition(S.loss_site[0], S.loss_site[1]) if S.loss_site is not None else None
    for optimizer in marks.optimizers()[:4]:
        graded = sum(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        made = steps.made_at.get(optimizer, sites.UNKNOWN)
        S.recorder.event(
            "not_stepped", S.loss_site, made=sites.as_json(made), kind=type(optimizer).__name__, backwards=S.backwards, graded=graded,
            at=sites.as_json(at) if at is not None else None,
        )  # fmt: skip


def arm() -> None:
    backward.at_left.append(look, 1)
