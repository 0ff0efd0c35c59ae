"""Bytes that Python holds: in tensors without a graph, and in arrays and texts at the end of long containers. Asked only when memory has grown.

Some 20 ms in the probe's thread beside the two walks over all objects; only types of torch's, numpy's and Python's own are looked into, so that no code of
the user's runs. Tensors with a graph would be kept alive meanwhile, and counted as kept by the script (sensors/graphs.py). A dict of nothing but arrays is
not seen: Python's collector does not know it.
"""

from __future__ import annotations

import operator
import sys
from collections import deque
from functools import partial
from typing import Any

from . import living, unfilled

MIN_ENTRIES, MAX_PARTS = unfilled.MIN_ENTRIES, 8


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
        one = found.pop()
        total += len(one) * _bytes(_last(one), not isinstance(one, dict))
    return total


def _last(one: Any) -> Any:
    try:
        return next(reversed(one.values() if isinstance(one, dict) else one), None)
    except RuntimeError:  # another thread adds to it
        return None


def _bytes(entry: Any, alike: bool) -> int:
    """`alike`: the others are of its kind, so that it may be looked into; the values of a namespace are not."""
    kind = type(entry)
    if kind in (bytes, bytearray, str):
        return len(entry)
    if alike and kind in (tuple, list):
        return sum(_bytes(part, False) for part in entry[:MAX_PARTS])
    numpy = sys.modules.get("numpy")
    return int(entry.nbytes) if numpy is not None and kind is numpy.ndarray else 0
