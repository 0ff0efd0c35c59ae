"""Which statements tell DDP not to synchronise. It reads that in its forward, not in the backward.

Event "no_sync" (first time a statement enters it): index, site, callers (the lines that led there, innermost first).
Event "sync_flag" (first time a statement sets require_backward_grad_sync itself): index, site, late (a forward of this DDP object had run since
its last backward: that backward goes by what the forward found).
"""

from __future__ import annotations

import sys
from typing import Any

from .. import sites
from ..patching import before
from ..state import S

MAX_SITES = 50
_contexts: set[sites.Site] = set()
_flags: set[tuple[sites.Site, bool]] = set()


def _note_no_sync(model: Any) -> None:
    site = sites.here(4)
    if site not in _contexts:
        _contexts.add(site)
        callers = [sites.as_json(s) for s in sites.stack(4, 4)[1:]]
        S.recorder.event("no_sync", site, index=next((w.index for w in S.ddps if w.ref() is model), -1), callers=callers)


def note_flag(wrapped: Any) -> None:
    """The flag of a DDP object is set; by a statement of the user's, as no_sync() sets it for itself."""
    frame = sites.beyond_ours(sys._getframe(1))
    if wrapped is None or frame is None or not sites.is_user_code(frame.f_code):
        return
    key = (sites.of_frame(frame), wrapped.forwards > 0)
    if key not in _flags and len(_flags) < MAX_SITES:
        _flags.add(key)
        S.recorder.event("sync_flag", key[0], index=wrapped.index, late=key[1])


def arm() -> None:
    from torch.nn.parallel import DistributedDataParallel as DDP

    before(DDP, "no_sync", _note_no_sync)
