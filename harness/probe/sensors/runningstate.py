"""Running values that a module keeps as plain tensors, and files that hold the rest of its model's state without them.

Event "running_unsaved" (once a model, at torch.save): site (of the save), path, module, names (dotted, first 20), updated (the statement of the
class that updates the first), made (the one that made it).
Asked of the source once, at the first step, where the values are read too: only what has changed since is told.
"""

from __future__ import annotations

import ast
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import cuts, digests, drawn, names, runningvalues, sites, syntax
from ..patching import contained
from ..state import S
from . import saving, steps

MAX_MODULES, MAX_VALUES, MAX_SAVES = 2000, 32, 8


@dataclass
class Running:
    """One attribute of one module."""

    root: weakref.ref[Any]
    module: weakref.ref[Any]
    name: str
    attribute: str
    updated: sites.Site
    first: int


_running: list[Running] = []
_num_saves = [0]


@contained
def _look(optimizer: Any, witness: Any, params: Any) -> None:
    if S.steps:
        return
    _running[:] = itertools.islice(_values(), MAX_VALUES)


def _values() -> Iterator[Running]:
    known: dict[type, dict[str, sites.Site]] = {}
    for root in names.root_modules():
        for name, module in itertools.islice(root.named_modules(), MAX_MODULES):
            kind = type(module)
            if kind not in known:
                known[kind] = runningvalues.attributes(kind)
            for attribute, updated in known[kind].items():
                if (value := _value(module, attribute)) is not None:
                    full = names.clean(f"{name}.{attribute}".lstrip("."))
                    yield Running(weakref.ref(root), weakref.ref(module), full, attribute, updated, _digest(value))


def _value(module: Any, attribute: str) -> Any:
    import torch

    value = vars(module).get(attribute)
    return value if type(value) is torch.Tensor and not value.requires_grad and value.is_floating_point() and digests.plain(value) else None


def _digest(value: Any) -> int:
    return digests.of_tensors([value])[1][0]


@contained
def _at_save(thing: Any, site: sites.Site, path: str) -> None:
    if not _running or _num_saves[0] >= MAX_SAVES:
        return
    _num_saves[0] += 1
    found_in = list(saving.walk(thing))
    saved = {names.clean(name.rsplit("/", 1)[-1]) for name, _ in found_in}
    by_root: dict[int, list[Running]] = {}
    for one in _running:
        by_root.setdefault(id(one.root()), []).append(one)
    for found in by_root.values():
        root = found[0].root()
        if root is None or not _holds(saved, root):
            continue
        if lacking := [one for one in found if _is_lacking(one, saved, [t for _, t in found_in])]:
            _tell(lacking, site, path)


def _holds(saved: set[str], root: Any) -> bool:
    """Whether the file holds every parameter of the model."""
    wanted = {names.clean(name) for name, _ in root.named_parameters()}
    return bool(wanted) and wanted <= saved


def _is_lacking(one: Running, saved: set[str], tensors: list[Any]) -> bool:
    """By no name, and by no tensor of that value: a method of the class may hand it out under another name."""
    module = one.module()
    value = _value(module, one.attribute) if module is not None else None
    if value is None or (now := _digest(value)) == one.first or any(name.rsplit(".", 1)[-1] == one.attribute for name in saved):
        return False
    if now in digests.of_tensors([t for t in tensors if t.shape == value.shape])[1]:
        return False
    classes = {c.__name__ for c in type(module).__mro__}
    return not any(runningvalues.named_outside(file, one.attribute, classes) for file in {one.updated[0], *cuts.user_files()[: cuts.MAX_FILES]})


def _tell(lacking: list[Running], site: sites.Site, path: str) -> None:
    one = lacking[0]
    kind = type(one.module())
    told = [each.name for each in lacking]
    for each in lacking:
        _running.remove(each)
    S.recorder.event(
        "running_unsaved", site, path=path, module=kind.__name__, names=told[:20], updated=sites.as_json(one.updated), made=sites.as_json(_made(kind, one)),
    )  # fmt: skip


def _made(kind: type, one: Running) -> sites.Site:
    """The statement of the constructor that makes it; the update where there is none."""
    code = drawn.code_of(kind, "__init__")
    function = drawn.function_of(code) if code is not None else None
    for node in syntax.own_nodes(function) if function is not None and code is not None else ():
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(t, ast.Attribute) and t.attr == one.attribute for t in targets):
            return code.co_filename, node.lineno, "__init__"  # type: ignore[union-attr,attr-defined]
    return one.updated


def arm() -> None:
    steps.at_step.append(_look, 1)
    saving.at_save.append(_at_save)
