"""`Tensor.copy_` and `torch._foreach_copy_` while some sensor wants to know who copies into what; torch's own at all other times, and once something
is compiled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

from . import sites
from .patching import quiet
from .state import S

Look = Callable[[Any, Any, sites.Site], bool]  # (what is written to, what is copied, statement): whether this statement is of no more interest
_looks: dict[str, Look] = {}
_over: set[tuple[int, int]] = set()  # (id of the user's code, instruction) that is of no more interest to any of them


def watch(name: str, look: Look) -> None:
    if S.compiling:
        return
    _looks[name] = look
    _over.clear()
    _patch()


def leave(name: str) -> None:
    _looks.pop(name, None)
    if not _looks:
        _restore()


class _StandIn:
    """What torch has there until then, and equal to it: `__torch_function__` is given what stands on torch.Tensor at the time of the call, and looks it up
    in tables that may have been made before or after, by torch or by the script."""

    _torchdynamo_disable = True

    def __init__(self, original: Any, look: Callable[..., None]) -> None:
        self.original, self.look = original, look
        functools.update_wrapper(self, original)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if sites.is_user_code(frame.f_code) and (key := (id(frame.f_code), frame.f_lasti)) not in _over:
            self.look(key, args, kwargs)
        return self.original(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.original or (isinstance(other, _StandIn) and other.original is self.original)

    def __hash__(self) -> int:
        return hash(self.original)

    def __repr__(self) -> str:
        return repr(self.original)

    def __reduce__(self) -> Any:
        return self.original.__reduce__()


def _patch() -> None:
    import torch

    if "copy_" not in vars(torch.Tensor):
        look = quiet(_look)
        torch.Tensor.copy_ = _StandIn(torch.Tensor.copy_, look)  # type: ignore[method-assign]
        torch._foreach_copy_ = _StandIn(torch._foreach_copy_, look)


def _restore() -> None:
    import torch

    if "copy_" in vars(torch.Tensor):
        del torch.Tensor.copy_
    if isinstance(foreach := torch._foreach_copy_, _StandIn):
        torch._foreach_copy_ = foreach.original


def stop() -> None:
    """For good: something is compiled."""
    _looks.clear()
    _restore()


def _look(key: tuple[int, int], args: Any, kwargs: Any) -> None:
    if S.compiling:
        stop()
    kinds, site = _kinds(), sites.here(4)
    written, copied = args[0] if args else kwargs.get("self"), args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("src"))
    for one, source in zip(written, copied, strict=False) if isinstance(copied, (list, tuple)) else [(written, copied)]:
        asked = [look(one, source, site) for look in list(_looks.values())] if type(one) in kinds and type(source) in kinds else []
        if asked and all(asked):
            _over.add(key)


def _kinds() -> tuple[Any, ...]:
    import torch

    return torch.Tensor, torch.nn.Parameter
