"""Blocks of shared memory (`SharedMemory(create=True)` without a name of the script's) that nobody unlinks.

Event "block_made" (once a process): site.
Event "blocks" (of the process that makes them, at the 32nd, 64th, 128th and 256th of a statement): site, num (made so far), first_t (when the
first one was made), inodes (of those that still have their name, and that this process has closed).
Event "blocks_left" (of the process that the launcher started, at its end, if any process of the run has made blocks): inodes (of those
that still have their name). By then what the script unlinks at its end has been unlinked; Python's resource tracker comes later.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from .. import arm as arming
from .. import protocol, sites
from ..patching import quiet
from ..state import S
from . import segments

FIRST, LAST = 32, 256
MAX_STATEMENTS, MAX_LEFT = 32, 8192
AUTHORITIES = ("managers.py",)  # a SharedMemoryManager unlinks what is made through it


@dataclass
class _Made:
    first_t: int
    num: int = 0
    blocks: list[tuple[str, int, weakref.ref[Any]]] = field(default_factory=list)


_made: dict[tuple[int, sites.Site], _Made] = {}  # by process: a forked one makes its own
_told: set[int] = set()  # processes


def note(memory: Any, name: Any) -> None:
    caller = sys._getframe(4)  # segments' look, guarded, wrapper, who makes it
    site = sites.here(4)
    key = (os.getpid(), site)
    if name or not site[0] or os.path.basename(caller.f_code.co_filename) in AUTHORITIES or (key not in _made and len(_made) >= MAX_STATEMENTS):
        return
    if key[0] not in _told:
        _told.add(key[0])
        S.recorder.event("block_made", site)
    made = _made.setdefault(key, _Made(time.time_ns()))
    if made.num >= LAST:
        return
    made.num += 1
    own = str(memory.name).lstrip("/")
    made.blocks.append((own, segments.inode_of(own), weakref.ref(memory)))
    if made.num >= FIRST and made.num & (made.num - 1) == 0:
        closed = [inode for own, inode, ref in made.blocks if inode and segments.inode_of(own) == inode and _is_closed(ref())]
        S.recorder.event("blocks", site, num=made.num, first_t=made.first_t, inodes=closed)


def _is_closed(memory: Any) -> bool:
    return memory is None or getattr(memory, "_mmap", None) is None


@quiet
def _look_at_the_end() -> None:
    if S.recorder.role != "main":
        return
    left: list[int] = []
    folder = os.path.join(S.recorder.run_dir, protocol.REC_DIR)
    for entry in os.scandir(folder):
        if entry.name.endswith(protocol.SEGMENTS_SUFFIX):
            with open(entry.path, errors="surrogateescape") as lines:
                parts = [line.rstrip("\n").partition(" ") for line in lines]
            left += [int(inode) for inode, _, name in parts if inode.isdecimal() and segments.inode_of(name) == int(inode)]
    if left:
        S.recorder.event("blocks_left", inodes=left[:MAX_LEFT])


def arm() -> None:
    if os.path.isdir(segments.FOLDER):
        segments.at_made.append(note)
        arming.at_close.append(_look_at_the_end)
