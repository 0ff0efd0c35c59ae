"""Deques with a bound that is not reached yet, such as a replay buffer: what they hold grows and then stops. Asked only when memory has grown."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

MIN_ENTRIES, MAX_DEPTH, MAX_PARTS = 32, 3, 64


def held_bytes(found: Iterable[Any]) -> int:
    """Bytes of tensors and arrays in those of the containers that are such deques, by their last entry."""
    growing = [one for one in found if isinstance(one, deque) and one.maxlen and MIN_ENTRIES <= len(one) < one.maxlen]
    return sum(len(one) * _bytes(one[-1], MAX_DEPTH) for one in growing if len(one))


def _bytes(entry: Any, depth: int) -> int:
    size = getattr(entry, "nbytes", None)
    if isinstance(size, int):
        return size
    if depth and isinstance(entry, (bytes, bytearray, str)):
        return len(entry)
    if not isinstance(entry, (list, tuple)):
        entry = list((entry if isinstance(entry, dict) else getattr(entry, "__dict__", {})).values())
    return sum(_bytes(part, depth - 1) for part in entry[:MAX_PARTS]) if depth else 0
