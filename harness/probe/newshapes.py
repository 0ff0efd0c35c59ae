"""Whether a model's layers see ever new shapes: torch's library for CPUs (oneDNN) prepares each anew and keeps the last 1,024 such preparations.

Counted over MAX_CALLS calls of layers with weights, from when memory begins to grow; about 1 us a call of any module then. Nothing once something is
compiled.
"""

from __future__ import annotations

from typing import Any

from . import digests, modulehooks
from .patching import quiet
from .state import S

MAX_CALLS = 512
_seen: set[tuple[int, tuple[int, ...]]] = set()
_calls = [0]
_hook: list[Any] = []


def count() -> list[int]:
    """[calls that brought a layer a shape it had not seen, calls]; counting begins with the first time that it is asked."""
    if not _hook and not _calls[0] and not S.compiling:
        import torch

        _hook.append(torch.nn.modules.module.register_module_forward_pre_hook(quiet(_look)))
    return [len(_seen), _calls[0]]


def _look(module: Any, args: Any) -> None:
    if S.compiling or _calls[0] >= MAX_CALLS:
        modulehooks.remove(_hook)
    elif args and type(args[0]) is digests.tensor_kind() and "weight" in (vars(module).get("_parameters") or ()):
        _calls[0] += 1
        _seen.add((id(module), tuple(args[0].shape)))
