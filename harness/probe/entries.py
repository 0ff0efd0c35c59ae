"""Whether the script's source uses one entry alone of a list that it gathers from all ranks: `parts = gather_all(x); score(*parts[0])`.

Read from the source, once a call site. In doubt all of them are used: an index that is computed, a list that is handed on, unpacked or looped over.
"""

from __future__ import annotations

import ast
from functools import cache

from . import syntax
from .sites import Site

PLACE = {
    "all_gather_object": (0, "object_list"),
    "all_gather": (0, "tensor_list"),
    "gather_object": (1, "object_gather_list"),
    "gather": (1, "gather_list"),
}
MAX_DEPTH = 3


@cache
def only_one(op: str, file: str, line: int) -> Site | None:
    """Where the one entry is used; None where more than one is, or may be."""
    tree = syntax.tree(file) if op in PLACE else None
    if tree is None:
        return None
    scope = syntax.function_at(tree, line)
    name = next(
        (
            _name(n, *PLACE[op])
            for n in syntax.nodes(scope)
            if isinstance(n, ast.Call) and n.lineno <= line <= (n.end_lineno or 0) and _is(n, op)
        ),
        "",
    )
    used = _used(tree, scope, name, op, MAX_DEPTH) if name else None
    indices = {i for i, _ in used or ()}
    return (file, min(at for _, at in used), "") if used and len(indices) == 1 else None


def _is(call: ast.Call, name: str) -> bool:
    return (call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")) == name


def _name(call: ast.Call, place: int, keyword: str) -> str:
    given = next((k.value for k in call.keywords if k.arg == keyword), call.args[place] if len(call.args) > place else None)
    return given.id if isinstance(given, ast.Name) else ""


def _used(tree: ast.Module, scope: ast.AST, name: str, op: str, depth: int) -> list[tuple[int, int]] | None:
    """(constant index, line) of every use of this name; None where the whole list, or an entry that is not known, is used."""
    found: list[tuple[int, int]] = []
    harmless: set[int] = set()
    for node in syntax.nodes(scope):
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == name and isinstance(node.ctx, ast.Load):
            if not isinstance(node.slice, ast.Constant) or not isinstance(node.slice.value, int):
                return None
            found.append((node.slice.value, node.lineno))
            harmless.add(id(node.value))
        elif isinstance(node, ast.Call) and (_is(node, "len") or (op and _is(node, op))):
            harmless |= {id(part) for part in (*node.args, *(k.value for k in node.keywords))}
        elif isinstance(node, ast.Return) and getattr(node.value, "id", "") == name:
            below = _called(tree, getattr(scope, "name", ""), depth)
            if below is None:
                return None
            found += below
            harmless.add(id(node.value))
    loads = [n for n in syntax.nodes(scope) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
    return found if all(id(n) in harmless for n in loads) else None


def _called(tree: ast.Module, function: str, depth: int) -> list[tuple[int, int]] | None:
    """What the callers of a function that returns the list use of it."""
    found: list[tuple[int, int]] = []
    known: set[int] = set()
    for node in syntax.nodes(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call) and _is(node.value, function):
            if not isinstance(node.slice, ast.Constant) or not isinstance(node.slice.value, int):
                return None
            found.append((node.slice.value, node.lineno))
            known.add(id(node.value))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is(node.value, function):
            target = node.targets[0]
            if depth <= 0 or not isinstance(target, ast.Name):
                return None
            below = _used(tree, syntax.function_at(tree, node.lineno), target.id, "", depth - 1)
            if below is None:
                return None
            found += below
            known.add(id(node.value))
    calls = [n for n in syntax.nodes(tree) if isinstance(n, ast.Call) and _is(n, function)]
    return found if function and all(id(c) in known for c in calls) else None
