"""What stands in for a function of torch's own C code, and is equal to it.

`__torch_function__` is given the original of a function, and of a method what stands on torch.Tensor at the time of the call. It looks that up in tables,
torch's or the script's, which may have been made before we came, meanwhile, or after we left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodDescriptorType, MethodType
from typing import Any


class StandIn:
    _torchdynamo_disable = True

    def __init__(self, original: Any) -> None:
        self.original = original
        functools.update_wrapper(self, original)  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.original or (isinstance(other, StandIn) and other.original is self.original)

    def __hash__(self) -> int:
        return hash(self.original)

    def __repr__(self) -> str:
        return repr(self.original)

    def __reduce__(self) -> Any:
        return self.original.__reduce__()


class _Method(StandIn):
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)  # type: ignore[arg-type]


def stand_in(original: Any, function: Callable[..., Any]) -> Any:
    """`function` is called in the caller's frame, by the slot of the class: no frame of ours lies between."""
    kind = _Method if isinstance(original, MethodDescriptorType) else StandIn
    return type("StandIn", (kind,), {"__call__": staticmethod(function)})(original)
