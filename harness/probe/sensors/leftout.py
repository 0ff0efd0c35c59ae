"""A backward that follows another without a step, in a run that stepped after each before: accumulation does so from the start.

Event "step_condition" (once): site, the one `if` of the script's source around an optimizer's step; null where there is none, or more than one.
"""

from __future__ import annotations

from typing import Any

from .. import cuts, sites, sources
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
        return
    _told[0] = True
    found = {s for f in cuts.user_files()[: cuts.MAX_FILES] for s in sources.guarded_steps(f)}
    S.recorder.event("step_condition", found.pop() if len(found) == 1 else sites.UNKNOWN)


def arm() -> None:
    backward.at_backward.append(_look)
