"""Steps that leave no row (dark.py) and follow backwards which DDP's reducer did not answer.

Event "lone_step" (the first 16): opt.
"""

from __future__ import annotations

from typing import Any

from ..patching import contained
from ..state import S

MAX_TOLD = 16
_told = [0]


@contained
def look(witness: Any) -> None:
    """Before the step is closed. A DDP object on a group of its own is not counted in the dark."""
    if _told[0] < MAX_TOLD and all(getattr(model, "process_group", None) is S.group for w in S.ddps if (model := w.ref()) is not None):
        _told[0] += 1
        S.recorder.event("lone_step", opt=witness.opt)


def arm() -> None:
    """Nothing to patch: steps.py comes here."""
