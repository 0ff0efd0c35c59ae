"""Whether the script's source may use the factor of a GradScaler, or what it starts with, for more than to show or compare it (in doubt yes)."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache, partial
from typing import Any

from . import cuts, syntax

SHOWING = {"print", "debug", "info", "warning", "log", "write", "add_scalar", "add_scalars", "set_postfix", "set_description"}
Nodes = tuple[ast.AST, ...]


def anywhere() -> bool:
    """In one of the user's files."""
    files = cuts.user_files()
    return len(files) > cuts.MAX_FILES or any(in_file(file) for file in files)


def by_name(hook: Any) -> bool:
    """A function that reads something called after a scale; the scaler alone is none: its get_scale() is looked for in the source."""
    if isinstance(hook, partial):
        return _is_named(hook.keywords) or by_name(hook.func)
    code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    return code is None or _is_named((*code.co_names, *code.co_freevars, *code.co_varnames))


def _is_named(names: Iterable[str]) -> bool:
    return any("scale" in name.lower().replace("scaler", "") for name in names)


@cache
def in_file(file: str) -> bool:
    tree = syntax.tree(file)
    if tree is None:
        return True
    nodes = syntax.nodes(tree)
    idle = _idle(nodes)
    asked = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr in ("get_scale", "_scale") and id(n) not in idle]
    kept = dict(_kept(nodes))
    if any(id(n) not in kept for n in asked):
        return True
    return any(_is_read(nodes, idle, text) for text in (*(kept[id(n)] for n in asked), *_started_with(nodes, idle)))


def _idle(nodes: Nodes) -> set[int]:
    """What is only shown or compared."""
    found: set[int] = set()
    for node in nodes:
        name = (
            (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        )
        if name in SHOWING or isinstance(node, (ast.JoinedStr, ast.Compare)):
            found |= {id(n) for n in ast.walk(node)}
    return found


def _kept(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """The attribute of `name = scaler.get_scale()` -> "name"."""
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.value, ast.Call):
            yield id(node.value.func), ast.unparse(node.targets[0])


def _started_with(nodes: Nodes, idle: set[int]) -> Iterator[str]:
    """`args.scale` of `GradScaler(init_scale=args.scale)`, which stands there for this alone."""
    for call in (n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("GradScaler")):
        for given in (k.value for k in call.keywords if k.arg == "init_scale"):
            if isinstance(given, (ast.Name, ast.Attribute)):
                idle |= {id(n) for n in ast.walk(given)}
                yield ast.unparse(given)


def _is_read(nodes: Nodes, idle: set[int], text: str) -> bool:
    return any(
        isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Load) and id(n) not in idle and ast.unparse(n) == text
        for n in nodes
    )
