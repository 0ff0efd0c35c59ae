"""A few values of a few gradients and parameters of an optimizer, by position: what tells a difference by rounding from one that somebody made."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from . import digests

MAX_TENSORS, NUM_GRADIENT = 8, 6


def gradients(optimizer: Any) -> dict[str, list[float]]:
    return _sampled([p.grad for group in optimizer.param_groups for p in group["params"]], NUM_GRADIENT)


def weights(optimizer: Any) -> dict[str, list[float]]:
    """What the parameters' digests are made of, on the CPU, of those that have a gradient."""
    held = [p.detach() if p.grad is not None else None for group in optimizer.param_groups for p in group["params"]]
    return _sampled([p if p is None or p.device.type == "cpu" else None for p in held], digests.NUM_SAMPLES)


def _sampled(tensors: Sequence[Any], num: int) -> dict[str, list[float]]:
    chosen = ((i, t) for i, t in enumerate(tensors) if t is not None and digests.plain(t) and t.is_floating_point())
    return {str(i): [float(v) for v in digests.sampled(t, num).tolist()] for i, t in itertools.islice(chosen, MAX_TENSORS)}
