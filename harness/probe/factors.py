"""Whether one factor explains what became of some values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LEAST_VALUES = 3


def unit(dtype: Any) -> float:
    """Of rounding."""
    import torch

    return float(torch.finfo(dtype).eps)


def factor(before: Sequence[float], after: Sequence[float], close: float) -> float | None:
    """None where no one number does, or too few values tell. `close`: of the norm of the values."""
    square = sum(a * a for a in before)
    if len(before) != len(after) or sum(a != 0 for a in before) < LEAST_VALUES or not 0 < square < float("inf"):
        return None
    found = sum(a * b for a, b in zip(before, after, strict=True)) / square
    fits = all(abs(b - found * a) <= close * abs(found) * max(abs(a), close * square**0.5) for a, b in zip(before, after, strict=True))
    return found if fits and found else None
