"""How long this process has been runnable without a core: the kernel's run queue, from /proc/self/schedstat (the main thread; 6 us).

A rank that waits for a core is no straggler: the host is.
"""

from __future__ import annotations

import os
import time

from ..state import SinceStep

OWN_S = 0.004  # shorter own work of a step is not looked at: a read costs 6 us, and PRF102 looks for 5 ms a step
_fd: dict[int, int] = {}


def waited_s() -> float:
    """Seconds since the process began; 0 where the kernel does not say."""
    pid = os.getpid()
    fd = _fd.get(pid)
    try:
        if fd is None:
            _fd.clear()
            fd = _fd[pid] = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        return int(os.pread(fd, 128, 0).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def at_sync(since: SinceStep) -> None:
    """The step's first collective or backward: its own work ends here, and with it what that waited for a core."""
    since.first_sync = now = time.perf_counter()
    if now - since.start >= OWN_S:
        since.self_queue = max(0.0, waited_s() - since.queue)


def arm() -> None:
    """Nothing to patch: the step row asks for it."""
