"""Batches of a pass without a backward that somebody still keeps: `itertools.cycle(loader)` trains on them, and never asks the loader again.

Event "batches_held" (LATER steps after a complete pass without backward): loop, alive (of its first 4 batches, how many somebody still keeps).
"""

from __future__ import annotations

import weakref
from typing import Any

from ..state import S
from . import steps

LATER, MAX_PASSES = 8, 16
NUM_FIRST = 4  # batches of a pass that are remembered, by a weak reference to a tensor of each
_finished: list[tuple[int, int, list[weakref.ref[Any]]]] = []  # step to look again, loop, first batches


def note(loop: int, first: list[weakref.ref[Any]]) -> None:
    """A pass has ended without a backward."""
    if len(_finished) < MAX_PASSES and sum(ref() is not None for ref in first) > 2:
        _finished.append((S.steps + LATER, loop, first))


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if _finished and S.steps >= _finished[0][0]:
        _, loop, first = _finished.pop(0)
        S.recorder.event("batches_held", loop=loop, alive=sum(ref() is not None for ref in first))


def arm() -> None:
    steps.at_step.append(_at_step, when=_finished)
