"""A quiet thread: answers requests for stacks, and samples resident memory with the user's line ten times a second.

It is started at the first process group or step, by _thread, so that `threading.enumerate()` shows the script what it would show without us.
Event "stacks": request, threads {name: [site...]} innermost first, all frames of the user's code and the innermost of any.
Event "rss": samples [[t_ns, bytes, line digest]] every 20 samples, lines {digest: site}; only while memory moves.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from typing import Any

from .. import protocol, sites
from ..state import S

PERIOD_S = 0.1
_started: dict[int, bool] = {}
_answered = [""]


def start() -> None:
    """Once a process."""
    pid = os.getpid()
    if _started.get(pid) or S.recorder.disabled:
        return
    _started[pid] = True
    _thread.start_new_thread(_run, (S.recorder,))


def _run(recorder: Any) -> None:
    request = os.path.join(recorder.run_dir, protocol.STACKS_REQUEST)
    while not recorder.closed and not sys.is_finalizing():
        time.sleep(PERIOD_S)
        try:
            if os.path.exists(request):
                with open(request, encoding="utf-8") as f:
                    asked = f.read(64).strip()
                if asked and asked != _answered[0]:
                    _answered[0] = asked
                    recorder.event(protocol.STACKS, request=asked, threads=stacks())
        except Exception:
            recorder.errors += 1


def stacks() -> dict[str, list[Any]]:
    """All python threads of this process but ours."""
    me = threading.get_ident()
    titles = {t.ident: t.name for t in threading.enumerate()}
    found: dict[str, list[Any]] = {}
    for ident, top in sys._current_frames().items():
        if ident == me:
            continue
        frames: list[Any] = []
        frame: Any = top
        while frame is not None and len(frames) < 40:
            code = frame.f_code
            if not frames or sites.is_user_code(code):
                frames.append(sites.as_json((code.co_filename, frame.f_lineno, code.co_name)))
            frame = frame.f_back
        found[titles.get(ident, f"thread-{ident}")] = [f for f in frames if f]
    return found


def arm() -> None:
    """Started by the first process group (collectives.py) or the first step (steps.py)."""
