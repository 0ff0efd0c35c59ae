"""What /proc says about one process: whether it still is the one we mean, how much CPU it used, whether it holds a GPU."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
GPU_DEVICES = ("/dev/nvidia", "/dev/kfd")


def _fields(pid: int) -> list[bytes]:
    """The fields of /proc/<pid>/stat from the state on; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def start_ticks(pid: int) -> int:
    """Start time in clock ticks since boot, which with the pid names one process for ever; 0 where there is no such process."""
    fields = _fields(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def lives(pid: int, ticks: int) -> bool:
    """Whether the process with this pid that started at `ticks` still runs; a zombie does not."""
    fields = _fields(pid)
    return len(fields) > 19 and int(fields[19]) == ticks and fields[0] not in (b"Z", b"X")


def cpu_s(pid: int) -> float:
    """CPU seconds of all its threads so far; 0 where it is gone."""
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND if len(fields) > 12 else 0.0


def delayed_s(pid: int) -> float:
    """Seconds that its main thread was ready to run and had no core; 0 where the kernel does not count them."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def load_per_core() -> float:
    """Processes that want a core, mean of the last minute, to a core."""
    try:
        return os.getloadavg()[0] / len(os.sched_getaffinity(0))
    except (OSError, AttributeError):
        return 0.0


def holds_gpu(pid: int) -> bool:
    """Whether it has a GPU open; waiting for one looks like work to the CPU clock."""
    try:
        links = [entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(str(link).startswith(GPU_DEVICES) for link in links)
