"""What hangs below a process of this host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessInfo:
    pid: int
    ppid: int
    name: str
    state: str
    rss_bytes: int
    command: str


def tree(root: int) -> tuple[ProcessInfo, ...]:
    """All living descendants of `root`, parents before children."""
    import psutil

    try:
        below = psutil.Process(root).children(recursive=True)
    except psutil.Error:
        return ()
    found: list[ProcessInfo] = []
    for process in below:
        try:
            with process.oneshot():
                command = " ".join(process.cmdline())
                rss_bytes = process.memory_info().rss
                found.append(ProcessInfo(process.pid, process.ppid() or 0, process.name(), process.status(), rss_bytes, command))
        except psutil.Error:  # it ended while we looked
            continue
    return tuple(found)
