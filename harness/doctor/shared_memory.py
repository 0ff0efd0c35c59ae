"""Room in /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Iterable

from harness.doctor.line import ERROR, OK, WARNING, Host, Line

QUICK = True
WHY = "loader workers hand batches over in shared memory; where it is full they die by SIGBUS, without a traceback"
WANTED_BYTES, LEAST_BYTES = 512 * 2**20, 32 * 2**20


def look(host: Host) -> Iterable[Line]:
    try:
        space = os.statvfs(host.shm)
    except OSError as error:
        return [Line("shared memory", ERROR, f"{host.shm}: {(error.strerror or str(error)).lower()}", WHY, f"mount a tmpfs on {host.shm}")]
    return [judge(str(host.shm), space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)]


def judge(path: str, total: int, free: int) -> Line:
    says = f"{path} has {_size(free)} free of {_size(total)}"
    fix = "remount it larger (docker: --shm-size=2g), remove old segments, or take num_workers=0"
    level = ERROR if free < LEAST_BYTES else WARNING if free < WANTED_BYTES else OK
    return Line("shared memory", level, says, WHY, "" if level == OK else fix)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
