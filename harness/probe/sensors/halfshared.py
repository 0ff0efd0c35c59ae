"""Parameters that are private although share_memory() was called on the model that has them: put in, or given other data, after the call.

Event "half_shared" (in the parent, before a start, once a model and set of names): site (of the start), root (id of the model), module, asked (site of
share_memory()), names (trainable parameters in private memory, first 40), put (the statement that put each in; null where only its data are others),
num_shared.
Event "half_trained" (in a forked child, at its 2nd, 9th and 65th step): parts [[root, name]]: those that are other ones here by now, in the very memory that
the child inherited.
Event "half_used" (in the parent, once all children have been joined): site, parts, how: "forward" (of the very module that holds it) | "save" (it is in the
file), of parameters that still are bit by bit what they were at the start.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from .. import digests, sites
from ..patching import contained, quiet
from ..state import S
from . import edits, saving, shared, steps

MAX_ROOTS, MAX_PARTS, FULL_BYTES = 16, 40, 32_000_000
LOOKS = (1, 8, 64)


@dataclass
class Root:
    """A model that share_memory() was called on."""

    ref: weakref.ref[Any]
    asked: sites.Site
    params: dict[str, weakref.ref[Any]]
    told: tuple[str, ...] = ()


@dataclass
class Part:
    """A private parameter of such a model, as it was when the first child was started."""

    ref: weakref.ref[Any]
    key: list[Any]  # [root, name]
    owner: weakref.ref[Any]
    digest: int
    at: int


_roots: dict[int, Root] = {}
_parts: dict[int, Part] = {}  # by id of the parameter; a forked child inherits it
_owners: set[int] = set()
_used: set[int] = set()
_hook: list[Any] = []


def trainable(root: Any) -> list[tuple[str, Any]]:
    return [(n, p) for n, p in root.named_parameters() if p.requires_grad and p.device.type == "cpu" and digests.plain(p)]


@contained
def _shared(thing: Any, site: sites.Site) -> None:
    if hasattr(thing, "named_parameters") and len(_roots) < MAX_ROOTS:
        _roots[id(thing)] = Root(weakref.ref(thing), site, {n: weakref.ref(p) for n, p in trainable(thing)})
        edits.watch()  # which statements put something into a module from now on


@contained
def _starting(site: sites.Site) -> None:
    for root_id, root in _roots.items():
        model = root.ref()
        if model is not None:
            _look(root_id, root, model, site)


def _look(root_id: int, root: Root, model: Any, site: sites.Site) -> None:
    every = trainable(model)
    private = [(n, p) for n, p in every if not p.is_shared()][:MAX_PARTS]
    names = tuple(n for n, _ in private)
    if not private or len(private) == len(every) or names == root.told:
        return
    root.told = names
    for name, p in private:
        if id(p) not in _parts or _parts[id(p)].ref() is not p:
            owner = model.get_submodule(name.rpartition(".")[0])
            _owners.add(id(owner))
            _parts[id(p)] = Part(weakref.ref(p), [root_id, name], weakref.ref(owner), digest(p), digests.address(p))
    put = [sites.as_json(at) if (at := _put(root, model, n, p)) is not None else None for n, p in private]
    S.recorder.event(
        "half_shared", site, root=root_id, module=type(model).__name__, asked=sites.as_json(root.asked), names=list(names), put=put,
        num_shared=len(every) - len(private),
    )  # fmt: skip


def digest(p: Any) -> int:
    return digests.full(p) if p.numel() * p.element_size() <= FULL_BYTES else digests.of_tensors([p])[0]


def _put(root: Root, model: Any, name: str, p: Any) -> sites.Site | None:
    """The statement that put this parameter, or a module around it, in the place of what share_memory() saw there."""
    seen = root.params.get(name)
    if seen is not None and seen() is p:
        return None
    for part in name.split("."):
        if (found := edits.of_attributes.get((id(model), part))) is not None:
            return found
        model = getattr(model, part)
    return None


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if S.recorder.role == "child" and S.group is None and _parts and S.steps in LOOKS:
        _moved(params)


@contained
def _moved(params: Any) -> None:
    """In a child: its own memory, so nobody else wrote there."""
    parts = [part for p in params if (part := _parts.get(id(p))) is not None and part.ref() is p]
    moved = [part.key for part in parts if _is_private(part) and digest(part.ref()) != part.digest]
    if moved:
        S.recorder.event("half_trained", parts=moved)


def _is_private(part: Part) -> bool:
    p = part.ref()
    return p is not None and not p.is_shared() and digests.address(p) == part.at


@contained
def _joined() -> None:
    """The parent has waited for all: from now on what it computes with or saves tells whether the private parts were meant to be the workers'."""
    if _parts and not _hook and not S.compiling:
        import torch

        look = quiet(_forward)

        def hook(module: Any, args: Any) -> None:
            if id(module) in _owners:
                look(module)

        _hook.append(torch.nn.modules.module.register_module_forward_pre_hook(hook))


def _forward(module: Any) -> None:
    _tell("forward", sites.here(4), [id for id, part in _parts.items() if id not in _used and part.owner() is module])
    if len(_used) == len(_parts) and _hook:
        _hook.pop().remove()


@contained
def _saving(obj: Any, site: sites.Site, path: str) -> None:
    if _hook:
        inside = {digests.address(t) for _, t in saving.walk(obj) if t.device.type == "cpu" and digests.plain(t)}
        _tell("save", site, [id for id, part in _parts.items() if id not in _used and part.at in inside])


def _tell(how: str, site: sites.Site, ids: list[int]) -> None:
    parts = [_parts[id] for id in ids]
    same = [part.key for part in parts if (p := part.ref()) is not None and digests.address(p) == part.at and digest(p) == part.digest]
    if how == "forward":
        _used.update(ids)
    if same:
        S.recorder.event("half_used", site, parts=same, how=how)


def arm() -> None:
    shared.at_shared.append(_shared)
    shared.at_starting.append(_starting)
    shared.at_all_joined.append(_joined)
    saving.at_save.append(_saving)
    steps.at_step.append(_at_step, LOOKS[-1] + 1)
