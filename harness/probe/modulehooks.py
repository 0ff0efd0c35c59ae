"""The probe's hooks on all modules. dynamo would trace them with each module that it compiles or exports, and must not come into our files."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

PROBE = __name__.rpartition(".")[0] + "."
REGISTRIES = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs")


def remove(handles: list[Any]) -> None:
    with suppress(IndexError):  # another thread's forward may be here as well: each takes what is left
        while handles:
            handles.pop().remove()


def remove_all() -> None:
    """Whoever set them; to remove one of them again does nothing."""
    import torch

    hooks = {id for name in REGISTRIES[:2] for id, hook in list(_registry(torch, name).items()) if str(getattr(hook, "__module__", "")).startswith(PROBE)}
    for name in REGISTRIES:
        for id in hooks:
            _registry(torch, name).pop(id, None)


def _registry(torch: Any, name: str) -> dict[int, Any]:
    found: dict[int, Any] = getattr(torch.nn.modules.module, name, {})
    return found
