"""Gradients that the script writes itself: where, from its source, since an assignment to `.grad` calls nothing that could be hooked.

Event "grad_written" (once an optimizer, within its first steps, where DDP wraps its parameters): opt, site (the first statement of the script that
gives a `.grad` other values; null: none was found), backward (False: no backward() ran before this step, so the gradients came another way;
True: they were other ones at the end of the backward than at the step).
"""

from __future__ import annotations

import math
from typing import Any

from .. import cuts, sites, sources
from ..state import S
from . import steps

NUM_STEPS = 4
_told: set[int] = set()


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if S.steps >= NUM_STEPS or not witness.of_ddp or witness.opt in _told or S.since.num_backward:
        return
    if any(p is not None and p.grad is not None for p in params):
        tell(witness.opt, backward=False)


def note_changed(opt: int, local: dict[str, list[float]], at_step: dict[str, list[float]]) -> None:
    """After the sampled gradients of a step are known; a clip has its own event."""
    if S.ddps and opt not in _told and math.isnan(S.since.grad_norm) and any(at_step.get(k) != v for k, v in local.items()):
        tell(opt, backward=True)


def tell(opt: int, *, backward: bool) -> None:
    _told.add(opt)
    files = cuts.user_files()[: cuts.MAX_FILES]
    found = next((s for f in files for s in sources.gradient_writes(f)), sites.UNKNOWN)
    S.recorder.event("grad_written", found, opt=opt, backward=backward)


def arm() -> None:
    steps.at_step.append(_at_step, NUM_STEPS)
