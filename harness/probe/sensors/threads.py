"""Threads of the script's own that stand still in a wait, more and more of them: a prefetcher that goes on filling the queue of a loop that was left.

Event "threads_held" (at 4, 8, 16, ... of one place and one start, and at the end): site (the line of the user's that they stand in), started_at
[site], num (that stand there, in a wait without a time limit, and have not moved for a second), steps (in how many different steps they were
started), first, last (the first and the last of these steps).
The beat looks twice a second; where fewer than four such threads were started it looks at nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from .. import sites
from ..arm import at_close, on_import
from ..patching import after, quiet
from ..state import S

FIRST, MAX_STARTED, MAX_PLACES = 4, 4096, 64
STILL = 3  # looks
WAITS = ("threading.py", "queue.py")  # what a thread that waits for another stands in, below the user's line
Stand = tuple[sites.Site, sites.Site]  # (where it stands, where it was started)
_started: dict[int, tuple[sites.Site, int]] = {}  # ident -> (site, step)
_seen: dict[int, tuple[tuple[int, int], int]] = {}  # ident -> (the call that it waits in, looks at which it was that)
_told: dict[Stand, int] = {}


def _after_start(result: Any, thread: Any, *args: Any, **kwargs: Any) -> None:
    site = sites.here(4)
    if site[0] and len(_started) < MAX_STARTED and thread.ident is not None:
        _started[thread.ident] = (site, S.steps)


def look(least: int = FIRST) -> None:
    """By the beat. No lock is taken: `threading.enumerate` would hold one while the script may fork."""
    if len(_started) < FIRST:
        return
    standing: dict[Stand, list[int]] = {}
    for stand, step in _standing():
        standing.setdefault(stand, []).append(step)
    for stand, steps in standing.items():
        if len(steps) >= max(least, 2 * _told.get(stand, 0)) and (stand in _told or len(_told) < MAX_PLACES):
            _told[stand] = len(steps)
            _tell(stand, steps)


def _standing() -> Iterator[tuple[Stand, int]]:
    """(place, step of its start) of each thread that has not moved for a while."""
    frames = sys._current_frames()
    for ident, (site, step) in list(_started.items()):
        top = frames.get(ident)
        if top is None:
            _started.pop(ident, None)
            _seen.pop(ident, None)
        elif (at := _waits_at(top)) is not None:
            call = (id(top), top.f_lasti)
            known = _seen.get(ident)
            _seen[ident] = (call, known[1] + 1 if known is not None and known[0] == call else 1)
            if _seen[ident][1] >= STILL:
                yield (at, site), step


def _waits_at(top: FrameType) -> sites.Site | None:
    """The user's line below a wait of the standard library's. A thread of a pool that has nothing to do has none, and one that waits for a limited
    time goes on by itself: of such there are only as many as are started in that time."""
    if os.path.basename(top.f_code.co_filename) not in WAITS or sites.is_user_code(top.f_code) or _ends_by_itself(top):
        return None
    frame = sites.user_frame(top)
    return sites.of_frame(frame) if frame is not None else None


def _ends_by_itself(top: FrameType) -> bool:
    """The waits of `threading` call their limit `timeout`: None or -1 is none."""
    limit = top.f_locals.get("timeout")
    return isinstance(limit, (int, float)) and limit >= 0


def _tell(stand: Stand, steps: list[int]) -> None:
    at, started = stand
    S.recorder.event(
        "threads_held", at, started_at=sites.as_json(started), num=len(steps), steps=len(set(steps)), first=min(steps), last=max(steps)
    )


@quiet
def _finish() -> None:
    """As it is at the end, whatever was told before."""
    _told.clear()
    look()


def _on_threading(module: Any) -> None:
    after(module.Thread, "start", _after_start)


def arm() -> None:
    at_close.append(_finish)
    on_import("threading", _on_threading)
