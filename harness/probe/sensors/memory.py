"""Resident memory now. /proc/self/statm is read through one open descriptor (8 us); CUDA's counters where CUDA is in use."""

from __future__ import annotations

import os
import sys
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")
_fd: dict[int, int] = {}


def rss_bytes() -> int:
    pid = os.getpid()
    fd = _fd.get(pid)
    try:
        if fd is None:
            _fd.clear()
            fd = _fd[pid] = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        return int(os.pread(fd, 64, 0).split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def now(step: int) -> tuple[int, int, int]:
    """(resident, CUDA allocated, CUDA reserved) bytes."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return rss_bytes(), int(torch.cuda.memory_allocated()), int(torch.cuda.memory_reserved())
    return rss_bytes(), 0, 0


def arm() -> None:
    """Nothing to patch: rows and the beat ask for it."""
