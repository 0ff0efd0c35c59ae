"""The processes of this host as /proc shows them, and how one is ended without ever touching a stranger.

A process is ours if it descends from the supervisor, or if it runs under our user and bears the run id in its environment. Between looking
and signalling the pid may be reused, so a process is pinned by a pidfd and its start time is read again before the signal goes out.
"""

# ruff: noqa: PTH115, PTH116, PTH208
# a look at the table is thousands of paths; plain strings cost a fifth

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.probe.protocol import ENV_RUN_ID

PROC = "/proc"
TCP_LISTEN = "0A"


@dataclass(frozen=True)
class Process:
    pid: int
    ppid: int
    session: int
    ticks: int  # start time: with the pid it names one process for ever
    state: str
    name: str

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def read(pid: int) -> Process | None:
    try:
        text = _bytes(f"{PROC}/{pid}/stat").decode("utf-8", "replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0], name)


def snapshot() -> dict[int, Process]:
    """All processes of this host. About 15 us each."""
    found = (read(int(entry)) for entry in os.listdir(PROC) if entry.isdigit())
    return {process.pid: process for process in found if process}


def descendants(table: dict[int, Process], root: int) -> list[Process]:
    """Living descendants of `root`, nearest first. With a subreaper as root this holds orphans and own sessions too."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process)
    found: list[Process] = []
    wave = children.get(root, [])
    while wave:
        found += wave
        wave = [child for process in wave for child in children.get(process.pid, [])]
    return [process for process in found if process.alive]


def marked(table: dict[int, Process], run_id: str) -> list[Process]:
    """Living processes of our user that bear the run id in their environment, wherever they hang in the tree."""
    mark = f"{ENV_RUN_ID}={run_id}".encode()
    return [process for process in table.values() if process.alive and _bears(process.pid, mark)]


def _bears(pid: int, mark: bytes) -> bool:
    try:
        if os.stat(f"{PROC}/{pid}").st_uid != os.getuid():
            return False
        return mark in _bytes(f"{PROC}/{pid}/environ").split(b"\0")
    except OSError:
        return False


def send(process: Process, number: int) -> bool:
    """Signals exactly this process; False where it is gone or its pid belongs to another one by now."""
    try:
        pin = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        now = read(process.pid)
        if now is None or now.ticks != process.ticks or not now.alive:
            return False
        signal.pidfd_send_signal(pin, number)
    except OSError:
        return False
    finally:
        os.close(pin)
    return True


def same(process: Process) -> bool:
    """Whether it still lives."""
    now = read(process.pid)
    return now is not None and now.alive and now.ticks == process.ticks


def oom_kills() -> int:
    """How often the kernel of this host has killed for want of memory, control groups included; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError), open(f"{PROC}/vmstat") as lines:
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def command_line(pid: int, limit: int = 120) -> str:
    try:
        words = _bytes(f"{PROC}/{pid}/cmdline").rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode("utf-8", "replace") for word in words)[:limit]


def listening_ports(pids: Iterable[int]) -> dict[int, list[int]]:
    """Ports on which these processes listen: sockets of theirs that the kernel lists as listening."""
    sockets = _listening_sockets()
    found: dict[int, list[int]] = {}
    for pid in pids:
        if ports := sorted({sockets[inode] for inode in socket_inodes(pid) if inode in sockets}):
            found[pid] = ports
    return found


def _listening_sockets() -> dict[str, int]:
    ports: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"{PROC}/net/{table}") as lines:
            next(lines, None)
            for fields in map(str.split, lines):
                if fields[3] == TCP_LISTEN:
                    ports[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return ports


def socket_inodes(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"{PROC}/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{PROC}/{pid}/fd/{entry}")
                if target.startswith("socket:["):
                    yield target[8:-1]
