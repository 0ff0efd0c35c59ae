"""What of the resident memory's growth is no growth of what the program holds: blocks that were there from the start and are touched for the first
time, such as the array of a replay buffer, and what malloc has taken back and keeps.

Read from the kernel's map of this process and from glibc; 2 ms, asked once early in training and each time that memory has grown fourfold.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import NamedTuple

MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 16_000_000, 64_000_000_000
MIN_ABSENT_BYTES = 4_000_000
MAX_BLOCKS = 64
Block = tuple[int, int]  # first address, behind the last


class Heap(NamedTuple):
    """`blocks`: address ranges that are not wholly touched -> bytes of them that are; `held`, `kept`: bytes that malloc has given out, and that it
    keeps though nobody holds them."""

    blocks: dict[Block, int]
    held: int
    kept: int


NONE = Heap({}, 0, 0)


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def now() -> Heap:
    held, kept = _malloc()
    blocks = {block: touched for block in _mapped() if (touched := _touched(block)) is not None}
    partly = {block: touched for block, touched in blocks.items() if block[1] - block[0] - touched >= MIN_ABSENT_BYTES}
    return Heap(partly, held, kept)


def since(before: Heap) -> dict[str, int]:
    """In bytes, of the growth since then: `filled` in blocks that were mapped then, `held` more by the program, `kept` more by malloc."""
    held, kept = _malloc()
    touched = {block: _touched(block) for block in before.blocks}
    filled = sum(max(0, more - before.blocks[block]) for block, more in touched.items() if more is not None)
    return {"filled": filled, "held": held - before.held, "kept": kept - before.kept}


def _malloc() -> tuple[int, int]:
    """(given out, kept) by glibc's malloc over all of its arenas; zeros where another one serves, or an old glibc."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0, 0
    ask.restype = _Mallinfo
    told = ask()
    return int(told.uordblks + told.hblkhd), int(told.fordblks)


def _mapped() -> list[Block]:
    """Large private ranges without a file."""
    found: list[Block] = []
    try:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
            for line in lines:
                parts = line.split()
                if len(parts) == 5 and parts[1] == "rw-p" and parts[4] == "0":
                    first, _, end = parts[0].partition("-")
                    block = int(first, 16), int(end, 16)
                    if MIN_BLOCK_BYTES <= block[1] - block[0] <= MAX_BLOCK_BYTES:
                        found.append(block)
    except OSError:
        return []
    return sorted(found, key=lambda b: b[0] - b[1])[:MAX_BLOCKS]


def _touched(block: Block) -> int | None:
    """Bytes of the range that are in memory; None where it is not mapped as a whole any more, or the system does not tell."""
    pages = (block[1] - block[0]) // mmap.PAGESIZE
    told = (ctypes.c_ubyte * pages)()
    try:
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(block[0]), ctypes.c_size_t(pages * mmap.PAGESIZE), told)
    except (OSError, AttributeError):
        return None
    return None if failed else (pages - bytes(told).count(0)) * mmap.PAGESIZE
