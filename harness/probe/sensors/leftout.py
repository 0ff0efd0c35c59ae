"""A backward that follows another without a step, in a run that stepped after each before: accumulation does so from the start.

Event "step_condition" (once): site, the one `if` of the script's source around an optimizer's step; null where there is none, or more than one.
Event "window_condition" (once, where a run accumulates from its first step on): site, what decides there that a window is full; null likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .. import cuts, sites, sources, stepguards
from ..patching import contained
from ..state import S
from . import backward

_told = [False]


@contained
def _look(loss: Any) -> None:
    if _told[0] or S.since.num_backward == 0:
        return
    if S.since.num_backward > 1 or S.steps < 1:
        _told[0] = S.steps < 1
        if _told[0]:
            _tell("window_condition", stepguards.decided_at)
        return
    _told[0] = True
    _tell("step_condition", sources.guarded_steps)


def _tell(kind: str, read: Callable[[str], Iterable[sites.Site]]) -> None:
    found = {s for f in cuts.user_files()[: cuts.MAX_FILES] for s in read(f)}
    S.recorder.event(kind, found.pop() if len(found) == 1 else sites.UNKNOWN)


def arm() -> None:
    backward.at_backward.append(_look)
