"""Bytes that Python holds: in tensors without a graph, and in arrays, texts and numbers in long containers. Asked only when memory has grown.

Some 50 ms in the probe's thread beside the two walks over all objects; no code of the user's runs. Tensors with a graph would be kept alive meanwhile, and
counted as kept by the script (sensors/graphs.py). A long dict of nothing but arrays is not seen: Python's collector does not know it.
"""

from __future__ import annotations

import gc
import operator
import sys
from collections import deque
from functools import partial
from typing import Any

from . import heldvalues, living, unfilled

MIN_ENTRIES, MAX_PARTS, MAX_DEPTH, NUMBER_BYTES = unfilled.MIN_ENTRIES, 8, 3, 32  # a number and the reference to it


def look() -> dict[str, int]:
    """stored: all of these bytes; unfilled_bytes: those in deques that are not full yet (unfilled.py)."""
    containers = living.of((list, deque, dict), len, partial(operator.le, MIN_ENTRIES))
    unfilled_bytes = unfilled.held_bytes(containers)
    return {"stored": _of_tensors() + _of_containers(containers), "unfilled_bytes": unfilled_bytes}


def _of_tensors() -> int:
    import torch

    found = living.of((torch.Tensor,), vars(torch._C.TensorBase)["requires_grad"].__get__, operator.not_)
    sizes: dict[int, int] = {}
    while found:
        try:
            storage = found.pop().untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        except (RuntimeError, NotImplementedError):  # sparse, or without memory
            continue
    return sum(sizes.values())


def _of_containers(found: list[Any]) -> int:
    total = 0
    while found:  # none is held longer than need be
        total += _in_container(found.pop())
    return total


def _in_container(one: Any) -> int:
    """By its last entry, where the others are of its kind; the values of a namespace are not."""
    try:
        entries = one.values() if isinstance(one, dict) else one
        first, last = next(iter(entries), None), next(reversed(entries), None)
    except RuntimeError:  # another thread adds to it
        return 0
    return len(one) * _bytes(last, MAX_DEPTH) if type(first) is type(last) else 0


def _bytes(entry: Any, depth: int) -> int:
    kind = type(entry)
    if kind in (bytes, bytearray, str):
        return len(entry)
    if kind in (float, int):
        return NUMBER_BYTES
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray:
        return int(entry.nbytes)
    if not depth or (kind in (list, dict) and len(entry) >= MIN_ENTRIES and gc.is_tracked(entry)):
        return 0  # it is found by itself
    parts = list(entry if kind in (tuple, list) else (entry if kind is dict else heldvalues.own_attributes(entry)).values())
    return sum(_bytes(part, depth - 1) for part in parts[:MAX_PARTS]) * len(parts) // max(1, min(len(parts), MAX_PARTS))
