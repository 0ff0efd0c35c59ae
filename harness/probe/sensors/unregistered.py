"""Which parameters belong to modules in a plain list of a module that is trained: read by reached.py, which tells them.

Not where a container holds one module alone, or one in eval mode, one that was given a state, one with a part of a library that may have brought
its weights or a constructor that gives them values, or one of which any parameter is in an optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from .. import drawn, names, plainlists, sites
from . import states

MAX_MODULES = 2000
_loaded: list[weakref.ref[Any]] = []  # modules that were given a state
_kinds: dict[type, dict[str, sites.Site]] = {}


def find(lost: set[int], held: dict[int, Any]) -> dict[int, tuple[str, sites.Site]]:
    """Of these parameters: id -> (name, the statement that makes the list)."""
    loaded = {id(m) for ref in _loaded if (m := ref()) is not None}
    found: dict[int, tuple[str, sites.Site]] = {}
    for root in names.root_modules():
        for name, at, modules in _lists(root) if any(id(p) in held for p in root.parameters()) else ():
            params = [(key, list(m.named_parameters())) for key, m in modules]
            if not all(_as_made(m, loaded) for _, m in modules) or any(id(p) in held for _, own in params for _, p in own):
                continue
            if sum(any(id(p) in lost for _, p in own) for _, own in params) > 1:
                found.update((id(p), (f"{name}[{key}].{n}", at)) for key, own in params for n, p in own if id(p) in lost)
    return found


def _lists(root: Any) -> Iterator[tuple[str, sites.Site, list[tuple[Any, Any]]]]:
    for number, (path, module) in enumerate(root.named_modules()):
        if number >= MAX_MODULES:
            return
        kind = type(module)
        if kind.__module__.startswith("torch."):
            continue
        if kind not in _kinds:
            _kinds[kind] = plainlists.attributes(kind)
        for attribute, at in _kinds[kind].items():
            modules = _entries(vars(module).get(attribute))
            if len(modules) > 1:
                yield names.clean(f"{path}.{attribute}".lstrip(".")), at, modules


def _entries(value: Any) -> list[tuple[Any, Any]]:
    import torch

    entries = list(value.items()) if type(value) is dict else list(enumerate(value)) if type(value) in (list, tuple) else []
    return entries if all(isinstance(m, torch.nn.Module) for _, m in entries) else []


def _as_made(module: Any, loaded: set[int]) -> bool:
    """Its weights are those that its constructor drew, and nobody has put it aside."""
    return module.training and not any(id(m) in loaded or not _plain(type(m)) for m in module.modules())


def _plain(kind: type) -> bool:
    """A module of torch's, or of the user's whose constructor gives no weights a value."""
    if kind.__module__.startswith("torch.nn."):
        return True
    code = drawn.code_of(kind, "__init__")
    constructor = drawn.function_of(code) if code is not None else None
    return drawn.code_of(kind, "forward") is not None and (constructor is None or not plainlists.fills(constructor))


def _at_load(module: Any, *told: Any) -> None:
    _loaded[:] = [r for r in _loaded if r() is not None]
    known = {id(r()) for r in _loaded}
    _loaded.extend(weakref.ref(m) for m in module.modules() if id(m) not in known)


def arm() -> None:
    states.at_loaded.append(_at_load)
