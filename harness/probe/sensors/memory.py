"""Resident memory now. /proc/self/statm is read through one open descriptor (8 us); CUDA's counters where CUDA is in use.

Event "memory" (once, at the end of a process that trained or joined a group): peak_rss_bytes, uss_bytes, pss_bytes, total_bytes (of the
machine or of the control group), cuda_peak_bytes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ..arm import at_close
from ..state import S

_PAGE = os.sysconf("SC_PAGE_SIZE")
_fd: dict[int, int] = {}


def rss_bytes() -> int:
    return resident()[0]


def resident() -> tuple[int, int]:
    """(resident bytes, of them file-backed or shared)."""
    pid = os.getpid()
    fd = _fd.get(pid)
    try:
        if fd is None:
            _fd.clear()
            fd = _fd[pid] = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        fields = os.pread(fd, 128, 0).split()
        return int(fields[1]) * _PAGE, int(fields[2]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0, 0


def now(step: int) -> tuple[int, int, int]:
    """(resident, CUDA allocated, CUDA reserved) bytes."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return rss_bytes(), int(torch.cuda.memory_allocated()), int(torch.cuda.memory_reserved())
    return rss_bytes(), 0, 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as f:
            return f.read(65_536)
    except OSError:
        return ""


def _cgroup() -> str:
    """Folder of this process's control group (version 2); empty where there is none."""
    for line in _read("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            return os.path.join("/sys/fs/cgroup", line[3:].lstrip("/"))
    return ""


def oom_kills() -> dict[str, int]:
    """How often the kernel has killed for want of memory: in this control group and on this host. About 0.2 ms."""
    found: dict[str, int] = {}
    for scope, path in (("cgroup", os.path.join(_cgroup() or "/nowhere", "memory.events")), ("host", "/proc/vmstat")):
        for line in _read(path).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdigit():
                found[scope] = int(value)
    return found


def total_bytes() -> int:
    """What this process can have at most: the machine's memory or the control group's limit."""
    total = 0
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limit = _read(os.path.join(_cgroup() or "/nowhere", "memory.max")).strip()
    return min(total, int(limit)) if limit.isdigit() and total else total


def _kilobytes(text: str, name: str) -> int:
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(name))


def _finish() -> None:
    if not S.steps and S.group is None:
        return
    parts = _read("/proc/self/smaps_rollup")  # 5-20 ms, once
    torch: Any = sys.modules.get("torch")
    cuda = int(torch.cuda.max_memory_allocated()) if torch is not None and torch.cuda.is_initialized() else 0
    S.recorder.event(
        "memory",
        peak_rss_bytes=_kilobytes(_read("/proc/self/status"), "VmHWM:"),
        uss_bytes=_kilobytes(parts, "Private_Clean:") + _kilobytes(parts, "Private_Dirty:"),
        pss_bytes=_kilobytes(parts, "Pss:"),
        total_bytes=total_bytes(),
        cuda_peak_bytes=cuda,
    )


def arm() -> None:
    """Nothing to patch: rows and the beat ask for it."""
    at_close.append(_finish)
