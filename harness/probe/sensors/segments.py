"""Shared memory that this process makes by name, so that what is left of it after the run can be told from another job's (launch/shm.py).

No event, because the supervisor of a node reads no recordings: lines "inode name" in `<stem>.shm`, for SharedMemory(create=True) as it is made,
and for semaphores that are mapped at the end. Plain files that a script writes to /dev/shm are its own affair: they may be a cache for the next run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from .. import arm as arming
from .. import protocol
from ..patching import after, quiet
from ..state import S

FOLDER = "/dev/shm/"
SEMAPHORE = "sem."
MAX_NOTED = 256
_noted: set[str] = set()
at_made: list[Callable[[Any, Any], None]] = []  # sensors that are told of a new SharedMemory and of the name that the script gave it


def inode_of(name: str) -> int:
    """0 where nothing in /dev/shm has this name: it has been unlinked."""
    try:
        return os.stat(FOLDER + name, follow_symlinks=False).st_ino
    except OSError:
        return 0


def _note(names: Iterable[str]) -> None:
    lines = []
    for name in names:
        if name in _noted or len(_noted) >= MAX_NOTED:
            continue
        inode = inode_of(name)
        if not inode:  # unlinked meanwhile, as it should be
            continue
        _noted.add(name)
        lines.append(f"{inode} {name}\n")
    if lines:
        path = os.path.join(S.recorder.run_dir, protocol.REC_DIR, S.recorder.stem + protocol.SEGMENTS_SUFFIX)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            os.write(fd, "".join(lines).encode("utf-8", "surrogateescape"))
        finally:
            os.close(fd)


def _made(result: Any, memory: Any, name: Any = None, create: Any = False, *rest: Any, **more: Any) -> None:
    if create:
        _note([str(memory.name).lstrip("/")])
        for look in at_made:
            look(memory, name)


@quiet
def _mapped_at_the_end() -> None:
    """By inode: libc makes a semaphore under another name and links it. About a millisecond, once a process."""
    with open("/proc/self/maps", errors="replace") as lines:
        inodes = {int(line.split()[4]) for line in lines if FOLDER + SEMAPHORE in line}
    if inodes:
        with os.scandir(FOLDER) as entries:
            _note(sorted(e.name for e in entries if e.name.startswith(SEMAPHORE) and e.inode() in inodes))


def _arm_memory(module: Any) -> None:
    after(module.SharedMemory, "__init__", _made)


def arm() -> None:
    if os.path.isdir(FOLDER):
        arming.on_import("multiprocessing.shared_memory", _arm_memory)
        arming.at_close.append(_mapped_at_the_end)
