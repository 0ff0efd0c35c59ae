"""Shared parameters that a worker takes out of shared memory: another memory format, a cast, `p.data = ...` give them memory of its own, which it trains.

Event "taken_out" (in a child, at its 3rd, 9th and 65th step): site (the statement that converted the module, else the one in the file of
the backward that gives parameters other data, where there is but one), names, shapes of
the parameters that lay in shared memory when the child got them, do not now, and were moved by a step of this child.
Event "left_behind" (in the parent, once all children have been joined): site, module, names, shapes of the shared parameters that are bit by bit what they were
at the start, num_changed (of the others), how: "forward" (of the model) | "save" (they are in the file).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from .. import digests, names, sites, sources
from ..patching import after, contained, quiet, wrap
from ..state import S
from . import halfshared, saving, shared, steps

MAX_SEEN = 2000
FIRST, LOOKS = 1, (2, 8, 64)


@dataclass
class Part:
    """A shared parameter as the parent had it before the first child that got it."""

    ref: weakref.ref[Any]
    name: str
    digest: int


@dataclass
class Model:
    ref: weakref.ref[Any]
    parts: dict[int, Part] = field(default_factory=dict)


_models: dict[int, Model] = {}
_seen: dict[int, weakref.ref[Any]] = {}  # parameters that lie in shared memory, which a child unpickles or inherits
_out_at: dict[int, sites.Site] = {}
_first: dict[int, int] = {}  # digests after the first step of what a child has taken out
_depth = [0]
_hook: list[Any] = []


def _note_seen(p: Any) -> None:
    if len(_seen) < MAX_SEEN:
        _seen[id(p)] = weakref.ref(p)


def _is_out(p: Any) -> bool:
    ref = _seen.get(id(p))
    return ref is not None and id(ref()) == id(p) and p.device.type == "cpu" and not p.is_shared()


@contained
def _giving(site: sites.Site, modules: list[Any]) -> None:
    """Before a start, and right after it, when a spawned child's parameters have been put into shared memory on the way."""
    for module in modules:
        model = _models.get(id(module))
        if model is None or model.ref() is not module:
            model = _models[id(module)] = Model(weakref.ref(module))
        for name, p in halfshared.trainable(module):
            if id(p) not in model.parts and p.is_shared():
                model.parts[id(p)] = Part(weakref.ref(p), name, halfshared.digest(p))
                _note_seen(p)


def _unpickled(result: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    if S.recorder.role == "child":
        for p in vars(module).get("_parameters", {}).values():
            if p is not None and p.device.type == "cpu" and p.is_shared():
                _note_seen(p)


def _converting(original: Any) -> Any:
    note = quiet(_note_converted)

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _depth[0] or not _seen or S.recorder.role != "child":
            return original(self, *args, **kwargs)
        _depth[0] += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            _depth[0] -= 1
        note(self, sites.here(2))
        return result

    return _apply


def _note_converted(module: Any, site: sites.Site) -> None:
    for p in module.parameters():
        if _is_out(p):
            _out_at.setdefault(id(p), site)


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if _seen and S.recorder.role == "child" and S.group is None and (S.steps == FIRST or (_first and S.steps in LOOKS)):
        _look(params)


def _taken_at(params: list[Any]) -> sites.Site:
    converted = [_out_at[id(p)] for p in params if id(p) in _out_at]
    assigned = sources.rebinds(S.loss_site[0]) if S.loss_site and not converted else []
    return converted[0] if converted else assigned[0] if len(assigned) == 1 else sites.UNKNOWN


@contained
def _look(params: list[Any]) -> None:
    out = [p for p in params if p is not None and _is_out(p)]
    if S.steps == FIRST:
        _first.update({id(p): halfshared.digest(p) for p in out})
        return
    moved = [p for p in out if id(p) in _first and halfshared.digest(p) != _first[id(p)]]
    if moved:
        table, _ = names.owners(moved)
        S.recorder.event(
            "taken_out", _taken_at(moved), names=[table.get(id(p), "") for p in moved], shapes=[list(p.shape) for p in moved],
        )  # fmt: skip
        _first.clear()


@contained
def _joined() -> None:
    if _models and not _hook and not S.compiling:
        import torch

        look = quiet(_forward)

        def hook(module: Any, args: Any) -> None:
            if id(module) in _models:
                look(module)

        _hook.append(torch.nn.modules.module.register_module_forward_pre_hook(hook))


def _forward(module: Any) -> None:
    model = _models.pop(id(module))
    _tell(model, set(model.parts), "forward", sites.here(4))
    if not _models:
        _hook.pop().remove()


@contained
def _saving(obj: Any, site: sites.Site, path: str) -> None:
    if _hook:
        inside = {digests.address(t) for _, t in saving.walk(obj) if t.device.type == "cpu" and digests.plain(t)}
        for model in _models.values():
            _tell(model, {key for key, part in model.parts.items() if (p := part.ref()) is not None and digests.address(p) in inside}, "save", site)


def _tell(model: Model, used: set[int], how: str, site: sites.Site) -> None:
    module = model.ref()
    living = [(key, part, p) for key, part in model.parts.items() if (p := part.ref()) is not None]
    same = [(part.name, list(p.shape)) for key, part, p in living if key in used and halfshared.digest(p) == part.digest]
    if module is not None and same and len(same) < len(living):
        S.recorder.event(
            "left_behind", site, module=type(module).__name__, names=[n for n, _ in same], shapes=[s for _, s in same],
            num_changed=sum(halfshared.digest(p) != part.digest for _, part, p in living), how=how,
        )  # fmt: skip


def arm() -> None:
    import torch

    shared.at_giving.append(_giving)
    shared.at_started.append(_giving)
    shared.at_all_joined.append(_joined)
    saving.at_save.append(_saving)
    after(torch.nn.Module, "__setstate__", _unpickled)
    wrap(torch.nn.Module, "_apply", _converting)
    steps.at_step.append(_at_step, LOOKS[-1] + 1)
