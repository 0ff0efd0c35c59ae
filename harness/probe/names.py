"""Names of parameters. The optimizer knows none, so the modules that own its parameters are looked up once, among living modules.

Modules are noted as they are made (0.3 us each); a walk over gc's objects would cost 50-500 ms in a process that has loaded dynamo.
"""

from __future__ import annotations

import weakref
from typing import Any

from . import fullyshard, protocol

clean = protocol.clean_name
_living: dict[int, weakref.ref[Any]] = {}
_numbers: dict[int, int] = {}  # id of a living module -> how many were made before it
num_made = [0]


def note_module(module: Any) -> None:
    """Called for every nn.Module that is constructed, copied or unpickled."""
    key = id(module)

    def forget(ref: weakref.ref[Any]) -> None:
        if _living.get(key) is ref:
            del _living[key]
            _numbers.pop(key, None)

    _living[key] = weakref.ref(module, forget)
    _numbers.setdefault(key, num_made[0])
    num_made[0] += 1


def number_of(module: Any) -> int:
    """Its place in the order in which modules were made; -1 where that was not seen."""
    return _numbers.get(id(module), -1)


def root_modules() -> list[Any]:
    """Living nn.Modules that are no other living module's child, in order of creation."""
    found = [m for ref in list(_living.values()) if (m := ref()) is not None]
    children: set[int] = set()
    for module in found:
        children.update(id(child) for child in vars(module).get("_modules", {}).values() if child is not None)
    return [m for m in found if id(m) not in children and "_parameters" in vars(m)]


def modules_of(root: Any) -> list[Any]:
    """A module and all below it, each once, in an order of registration. torch's own `modules()` hands each through a generator a level: 2 us each."""
    found, seen, todo = [], set[Any](), [root]
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            found.append(module)
            if inside := vars(module)["_modules"]:  # most have none
                todo.extend([child for child in inside.values() if child is not None])
    return found


def _named(root: Any) -> list[tuple[str, Any]]:
    """Its parameters, and the shards in whose place FSDP2 has put gathered parameters for now."""
    found = list(root.named_parameters(remove_duplicate=False))
    shards = [(name, shard) for name, shard, _ in fullyshard.parameters(root, modules_of(root))]
    known = {id(p) for _, p in found} if shards else set()
    return found + [(name, shard) for name, shard in shards if id(shard) not in known]


def gathered(params: list[Any]) -> list[str]:
    """Names of those that are gathered parameters of FSDP2: it gives no gradient to them and forgets what is written into them."""
    known = {id(whole): name for root in root_modules() for name, _, whole in fullyshard.parameters(root, modules_of(root)) if whole is not None}
    return [clean(known[id(p)]) for p in params if id(p) in known]


def owners(params: list[Any]) -> tuple[dict[int, str], list[Any]]:
    """(id of parameter -> name, root modules that own at least one of them).

    With several roots the class name stands in front, so that two models' `weight` differ.
    """
    wanted = {id(p) for p in params}
    table: dict[int, str] = {}
    roots: list[tuple[Any, dict[int, str]]] = []
    for root in root_modules():
        own = {id(p): clean(name) for name, p in _named(root) if id(p) in wanted}
        if own and not all(key in table for key in own):
            roots.append((root, own))
            for key, name in own.items():
                table.setdefault(key, name)
    taken: set[str] = set()
    if len({n for _, own in roots for n in own.values()}) < len(table) or len(roots) > 1:
        table = {}
        for root, own in roots:
            label = type(root).__name__
            while len(roots) > 1 and label in taken:
                label += "'"
            taken.add(label)
            for key, name in own.items():
                table.setdefault(key, f"{label}.{name}" if len(roots) > 1 else name)
    return table, [root for root, _ in roots]


class Known:
    """The parameters of one optimizer: weak references, names, roots."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.params = [p for group in groups for p in group["params"]]
        table, roots = owners(self.params)
        self.names: list[str] = []
        for g, group in enumerate(groups):
            for i, p in enumerate(group["params"]):
                self.names.append(table.get(id(p), f"param[{g}][{i}]"))
        self.owned = [id(p) in table for p in self.params]
        self.roots = [weakref.ref(r) for r in roots]
        order = sorted(range(len(self.names)), key=lambda i: (self.names[i], i))
        self.order = order  # hashes are taken by name: a rank that defines its layers in another order is seen
