"""Deques with a bound that is not reached yet, such as a replay buffer: what they hold grows and then stops. Asked only when memory has grown."""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from typing import Any

MIN_ENTRIES, MAX_DEPTH, MAX_PARTS = 32, 3, 64
UNDISTURBED_S = 0.5  # several times what the walk takes


def held_bytes() -> int:
    """Bytes of tensors and arrays in all of them, by their last entry; about 30 ms for the walk over all containers."""
    found = [one for one in _deques() if one.maxlen and MIN_ENTRIES <= len(one) < one.maxlen]
    return sum(len(one) * _bytes(one[-1], MAX_DEPTH) for one in found if len(one))


def _deques() -> list[deque[Any]]:
    """All that live. While this thread holds all objects no other may run: one of the objects may be a tuple that another thread is making out of an
    iterator, and that fails, with a SystemError in the script's own line, where it is not the only one who holds it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(UNDISTURBED_S)
    try:
        time.sleep(2 * before)  # who waits for the GIL by now asks for it after the old interval
        return [thing for thing in gc.get_objects() if type(thing) is deque]
    finally:
        sys.setswitchinterval(before)


def _bytes(entry: Any, depth: int) -> int:
    size = getattr(entry, "nbytes", None)
    if isinstance(size, int):
        return size
    if depth and isinstance(entry, (bytes, bytearray, str)):
        return len(entry)
    if not isinstance(entry, (list, tuple)):
        entry = list((entry if isinstance(entry, dict) else getattr(entry, "__dict__", {})).values())
    return sum(_bytes(part, depth - 1) for part in entry[:MAX_PARTS]) if depth else 0
