"""Wrappers that a compiled model may call: dynamo traces through them to the original. The only file of the probe that it looks into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .patching import wrap


def traceable(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """As `wrap`, for functions that a compiled model calls: dynamo sees through to the original (`is_compiling` is a constant for it)."""
    import torch

    original = getattr(owner, name, None)
    if original is None or not wrap(owner, name, make):
        return False
    watched, is_compiling = getattr(owner, name), torch.compiler.is_compiling

    def through(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        return watched(*args, **kwargs)

    functools.update_wrapper(through, original)
    setattr(owner, name, through)
    return True
