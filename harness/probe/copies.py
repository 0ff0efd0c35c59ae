"""`Tensor.copy_` and `torch._foreach_copy_` while some sensor wants to know who copies into what; torch's own at all other times, and once something
is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from . import sites
from .patching import quiet
from .standin import StandIn, stand_in
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


def _watched(original: Any, look: Callable[..., None]) -> Any:
    def copy(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if sites.is_user_code(frame.f_code) and (key := (id(frame.f_code), frame.f_lasti)) not in _over:
            look(key, args, kwargs)
        return original(*args, **kwargs)

    return stand_in(original, copy)


def _patch() -> None:
    import torch

    if "copy_" not in vars(torch.Tensor):
        look = quiet(_look)
        torch.Tensor.copy_ = _watched(torch.Tensor.copy_, look)  # type: ignore[method-assign]
        torch._foreach_copy_ = _watched(torch._foreach_copy_, look)


def _restore() -> None:
    import torch

    if "copy_" in vars(torch.Tensor):
        del torch.Tensor.copy_
    if isinstance(foreach := torch._foreach_copy_, StandIn):
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
