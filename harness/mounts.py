"""Which file system a folder lies on, and whether another machine can see it."""

from __future__ import annotations

import re
from pathlib import Path

NEVER = ("tmpfs", "ramfs", "overlay", "squashfs")  # no other machine sees what lies there
LOCAL = (*NEVER, "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "vfat")  # another one sees it only where this machine exports it


def file_system_of(folder: Path, proc: Path = Path("/proc")) -> str:
    """The type of the file system on which a folder lies, or will: by the longest mount point above it. Empty where /proc does not say."""
    try:
        lines = (proc / "self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    place = folder.resolve()
    mounts = dict(map(_mount, lines))  # of two on one point the later one covers the other
    return next((mounts[point] for point in (place, *place.parents) if point in mounts), "")


def _mount(line: str) -> tuple[Path, str]:
    """(mount point, type) of one line of mountinfo, see proc(5); a point that is no absolute path where it is none."""
    fields, _, rest = line.partition(" - ")
    words = fields.split()
    if len(words) < 5 or not rest.split():
        return Path(), ""
    return Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[4])), rest.split()[0]
