"""`Tensor.copy_` and `torch._foreach_copy_` while some sensor wants to know who copies into what; torch's own at all other times, and once something
is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
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


def _patch() -> None:
    import torch

    if "copy_" in vars(torch.Tensor):
        return
    original, foreach, look = torch.Tensor.copy_, torch._foreach_copy_, quiet(_look)

    def copy_(self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if sites.is_user_code(frame.f_code) and (key := (id(frame.f_code), frame.f_lasti)) not in _over:
            look(key, [self], [source])
        return original(self, source, *args, **kwargs)

    def _foreach_copy_(self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if sites.is_user_code(frame.f_code) and (key := (id(frame.f_code), frame.f_lasti)) not in _over:
            look(key, self, source)
        return foreach(self, source, *args, **kwargs)

    for function in (copy_, _foreach_copy_):
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _original[:] = [foreach]
    torch.Tensor.copy_ = copy_  # type: ignore[method-assign, assignment]
    torch._foreach_copy_ = _foreach_copy_  # type: ignore[assignment]


_original: list[Any] = []


def _restore() -> None:
    import torch

    if "copy_" in vars(torch.Tensor):
        del torch.Tensor.copy_
        torch._foreach_copy_ = _original.pop()


def _look(key: tuple[int, int], written: Any, copied: Any) -> None:
    if S.compiling:
        _looks.clear()
        _restore()
    kinds, site = _kinds(), sites.here(4)
    for one, source in zip(written, copied, strict=False):
        asked = [look(one, source, site) for look in list(_looks.values())] if type(one) in kinds and type(source) in kinds else []
        if asked and all(asked):
            _over.add(key)


def _kinds() -> tuple[Any, ...]:
    import torch

    return torch.Tensor, torch.nn.Parameter
