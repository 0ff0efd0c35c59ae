"""Losses that a GradScaler multiplied: which one is which, and by how much. Writes no event itself."""

from __future__ import annotations

import weakref
from typing import Any

from ..patching import after
from ..state import S

_scaled: dict[int, tuple[Any, Any, float]] = {}  # id of a scaled loss -> weak references to it and to the loss it came from, the factor


def from_scaler(loss: Any) -> tuple[Any, Any, float] | None:
    """(weak reference to this scaled loss, one to the loss it came from, factor); None for any other loss."""
    found = _scaled.get(id(loss)) if _scaled else None
    return found if found is not None and found[0]() is loss else None


def scale_of(loss: Any) -> float:
    """The factor that a GradScaler put on this very loss; 0: none."""
    found = from_scaler(loss)
    return found[2] if found is not None else 0.0


def _after_scale(result: Any, scaler: Any, outputs: Any) -> None:
    several = isinstance(outputs, (list, tuple)) and isinstance(result, (list, tuple))
    for scaled, plain in zip(result, outputs, strict=False) if several else [(result, outputs)]:
        if hasattr(scaled, "grad_fn") and hasattr(plain, "grad_fn"):
            if len(_scaled) > 64:
                _scaled.clear()
            S.since.scale = float(scaler.get_scale()) if scaler.is_enabled() else 0.0
            _scaled[id(scaled)] = (weakref.ref(scaled), weakref.ref(plain), S.since.scale)


def arm() -> None:
    import torch

    after(torch.amp.GradScaler, "scale", _after_scale)
