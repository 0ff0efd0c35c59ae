"""The limits that the shell gives to a process."""

from __future__ import annotations

import resource
from collections.abc import Iterable

from harness.doctor.line import ERROR, OK, WARNING, Host, Line

QUICK = True
WHY = "ranks, their loader workers and their sockets each need descriptors and threads; a run that meets a limit dies in odd places"
FILES_A_RANK, THREADS_A_RANK = 256, 128  # torch opens about 100 descriptors and 30 threads a rank before the script does anything
BASE = 64


def look(host: Host) -> Iterable[Line]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    threads = resource.getrlimit(resource.RLIMIT_NPROC)
    yield judge("open files", "ulimit -n", files[0], BASE + FILES_A_RANK, "ulimit -n 65536")
    yield judge("processes and threads", "ulimit -u", threads[0], BASE + THREADS_A_RANK * host.nproc, "ulimit -u unlimited")
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY and address_space < 64 * 2**30:
        says = f"address space: {address_space / 2**30:.0f} GiB (ulimit -v)"
        yield Line("limits", WARNING, says, "torch maps tens of GiB that it never touches; a small limit fails imports", "ulimit -v unlimited")


def judge(what: str, command: str, limit: int, wanted: int, fix: str) -> Line:
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        shown = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
        return Line("limits", OK, f"{what}: {shown} ({command})", WHY)
    return Line("limits", ERROR if limit < wanted // 4 else WARNING, f"{what}: {limit} ({command}), {wanted} are wanted", WHY, fix)
