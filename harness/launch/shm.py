"""Segments in /dev/shm: which ones a run made, and which of them it left behind.

A name proves nothing but torch's (`torch_<pid>_...`); the others (`psm_*`, `sem.*`) count as ours if a rank noted that it made them, by inode, or
if one of our processes had them mapped, which is looked up now and then, and before a gang is killed. A segment that is merely new may be
another job's: it is none of our business.
"""

# ruff: noqa: PTH108, PTH116, PTH208
# plain strings, as in proctable

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from harness.probe import protocol

SHM = "/dev/shm"
MAX_NOTE_BYTES = 65_536
_TORCH = re.compile(r"torch_(\d+)_")


def segments() -> dict[str, int]:
    """name -> inode of every segment of our user."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHM):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid():
                    found[entry.name] = status.st_ino
    return found


def mapped_by(pid: int) -> set[str]:
    """Segments that a process has mapped or open right now; a few milliseconds for a process with torch loaded."""
    prefix = f"{SHM}/"
    names: set[str] = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as lines:
        names = {line.rstrip("\n").partition(prefix)[2] for line in lines if prefix in line}
    return {name for name in names if name and not name.endswith(" (deleted)")}


def made_by(name: str, pids: Iterable[int]) -> bool:
    """Whether torch named it after one of these processes."""
    match = _TORCH.match(name)
    return match is not None and match.group(1) in {str(pid) for pid in pids}


def noted(run_dir: Path) -> set[tuple[str, int]]:
    """(name, inode) of what the run's processes say that they made. A note may be forged: it counts only with the very inode that is there."""
    found: set[tuple[str, int]] = set()
    for path in (run_dir / protocol.REC_DIR).glob(f"*{protocol.SEGMENTS_SUFFIX}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                lines = os.pread(descriptor, MAX_NOTE_BYTES, 0).decode("utf-8", "surrogateescape").splitlines()
            finally:
                os.close(descriptor)
            found |= {(name, int(inode)) for inode, _, name in (line.partition(" ") for line in lines) if inode.isdecimal() and name}
    return found


def in_use(names: set[str]) -> set[str]:
    """Those of `names` that any process we may look at still maps."""
    used: set[str] = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            used |= mapped_by(int(entry)) & names
    return used


def remove(name: str, inode: int) -> bool:
    """Unlinks the very segment that was seen; False where another one bears its name by now."""
    with contextlib.suppress(OSError):
        if os.stat(f"{SHM}/{name}", follow_symlinks=False).st_ino == inode:
            os.unlink(f"{SHM}/{name}")
            return True
    return False
