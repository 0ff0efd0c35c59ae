"""Tensors that stand in the script's own containers with the graphs that they came from, more of them at every step.

graphs.py counts the graphs of losses and of what DDP gives out. Here the containers themselves are looked at, twice: what was computed through another
model (a critic, an averaged copy, the module inside) is kept alive in the same way.
Event "graphs_held" (once): site (the statement that fills the container, where the source shows one), name (of the container), num (tensors with a
graph in it at the second look), grown (since the first), steps (between the two).
"""

from __future__ import annotations

import ast
import sys
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

from .. import cuts, keepers, sites, syntax, variables
from ..patching import contained
from ..state import S
from . import keptlive, steps

LOOKS, A_STEP = (16, 40), 0.8
MAX_FRAMES, MAX_NAMES, MAX_ENTRIES, DEPTH = 4, 60, 2000, 3
_first: dict[str, int] = {}


@contained
def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if S.steps not in LOOKS:
        return
    held = dict(_held(sites.user_frame(sys._getframe(1))))
    if S.steps == LOOKS[0]:
        _first.update(held)
        return
    steps_between = LOOKS[1] - LOOKS[0]
    grown = {name: num - _first.get(name, 0) for name, num in held.items()}
    name = max(grown, key=lambda n: grown[n], default="")
    if name and grown[name] >= A_STEP * steps_between:
        S.recorder.event("graphs_held", _filled_at(name), name=name, num=held[name], grown=grown[name], steps=steps_between)
    _first.clear()


def _held(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """(container, tensors with a graph in it), of the variables of the user's frames and of what these hold."""
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        names = frame.f_locals
        found = [pair for name, value in list(names.items())[:MAX_NAMES] for pair in _within(name, value, DEPTH)]
        variables.let_go(frame, names)
        yield from found
        frame = sites.user_frame(frame.f_back)


def _within(name: str, value: Any, depth: int) -> Iterator[tuple[str, int]]:
    if type(value) in (list, deque):
        if num := sum(_graphs(entry) for entry in list(value)[-MAX_ENTRIES:]):
            yield name, num
    elif depth and isinstance(value, dict):
        for key, inner in list(value.items())[:MAX_NAMES]:
            yield from _within(f"{name}[{key!r}]", inner, depth - 1)
    elif depth and keptlive.is_plain_object(value):
        for attribute, inner in list(vars(value).items())[:MAX_NAMES]:
            yield from _within(f"{name}.{attribute}", inner, depth - 1)


def _graphs(entry: Any) -> int:
    """Tensors with a graph in an entry: the entry itself, or one of a few (a transition, a record)."""
    import torch

    parts = list(entry.values())[:16] if isinstance(entry, dict) else entry[:16] if isinstance(entry, (list, tuple)) else [entry]
    return sum(type(part) is torch.Tensor and part.grad_fn is not None for part in parts)


def _filled_at(name: str) -> sites.Site:
    """The one statement of the script that adds to a container of this last name."""
    last = name.partition("[")[0].rpartition(".")[2]
    found: set[sites.Site] = set()
    for file in cuts.user_files()[: cuts.MAX_FILES]:
        tree = syntax.tree(file)
        for node in syntax.nodes(tree) if tree is not None else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in keepers.ADDS and _is_named(node.func.value, last):
                found.add((file, node.lineno, ""))
    return found.pop() if len(found) == 1 else sites.UNKNOWN


def _is_named(node: ast.expr, name: str) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setdefault":
        node = node.func.value
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) == name


def arm() -> None:
    steps.at_step.append(_at_step, LOOKS[1] + 1)
