"""Where a model writes its own buffers: the statement of its forward, or of a method that forward names, as the source has it."""

from __future__ import annotations

import inspect
from typing import Any

from . import sites, sources

MAX_MODULES, MAX_BUFFERS = 4, 8


def place(module: Any, names: list[str]) -> Any:
    """The first such statement as JSON; None where the source shows none. `names`: of the buffers, with their modules'."""
    by_owner: dict[str, list[str]] = {}
    for full in names:
        owner, _, name = full.rpartition(".")
        by_owner.setdefault(owner, []).append(name)
    for owner, own in list(by_owner.items())[:MAX_MODULES]:
        for code in _reached(type(module.get_submodule(owner))):
            found = [s for name in own[:MAX_BUFFERS] if (s := sources.writes(code.co_filename, code.co_firstlineno, name)) is not None]
            if found:
                return sites.as_json(min(found, key=lambda s: s[1]))
    return None


def _reached(kind: type) -> list[Any]:
    """Code of the user's own forward, then of the methods of the class that it names."""
    forward = _user_code(kind, "forward")
    called = [_user_code(kind, name) for name in forward.co_names] if forward is not None else []
    return [code for code in (forward, *called) if code is not None]


def _user_code(kind: type, name: str) -> Any:
    method = getattr(kind, name, None)
    code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None  # `@torch.no_grad()` puts a wrapper around it
    return code if code is not None and sites.is_user_file(code.co_filename) else None
