"""What the host says about a process: whether it still is the one we mean, how much CPU it used, what hangs below it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
GPU_DEVICES = ("/dev/nvidia", "/dev/kfd")


@dataclass(frozen=True)
class ProcessInfo:
    pid: int
    ppid: int
    name: str
    state: str
    rss_bytes: int
    command: str


def _fields(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except (OSError, UnicodeDecodeError):
        return []


def lives(pid: int, ticks: int) -> bool:
    """Whether the process with this pid that started at `ticks` still runs; a zombie does not."""
    fields = _fields(pid)
    return len(fields) > 19 and int(fields[19]) == ticks and fields[0] not in "ZX"


def cpu_s(pid: int) -> float:
    """CPU seconds of all its threads so far; 0 where it is gone."""
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND if len(fields) > 12 else 0.0


def holds_gpu(pid: int) -> bool:
    """Whether it has a GPU open; waiting for one looks like work to the CPU clock."""
    try:
        links = [entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(str(link).startswith(GPU_DEVICES) for link in links)


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
