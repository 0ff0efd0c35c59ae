"""Statements that fill a container which hangs on an object and which nothing empties: a cache of a dataset, a list of a module."""

from __future__ import annotations

import ast

from . import syntax
from .sites import Site

EMPTY_CALLS = {"dict", "list", "set", "OrderedDict", "defaultdict", "deque"}
ADDS = {"append", "extend", "add", "insert", "appendleft", "update", "setdefault"}
EMPTIES = {"clear", "pop", "popitem", "popleft", "remove", "discard"}


def fillers(file: str) -> list[tuple[Site, ast.FunctionDef, ast.Assign | ast.Call]]:
    """(place, method, statement) of every statement in a method of this file that adds to such a container of `self`."""
    tree = syntax.tree(file) if file else None
    if tree is None:
        return []
    found: list[tuple[Site, ast.FunctionDef, ast.Assign | ast.Call]] = []
    emptied = _emptied(tree)
    for owner in (n for n in syntax.nodes(tree) if isinstance(n, ast.ClassDef)):
        names = _made_empty(owner) - emptied
        for method in (n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name != "__init__"):
            for node in sorted((n for n in syntax.own_nodes(method) if hasattr(n, "lineno")), key=lambda n: n.lineno):
                if isinstance(node, (ast.Assign, ast.Call)) and filled(node) in names:
                    found.append(((file, node.lineno, method.name), method, node))
    return found


def filled(node: ast.AST) -> str:
    """ "cache" of `self.cache[key] = value` and `self.cache.append(value)`; empty for anything else."""
    if isinstance(node, ast.Assign):
        return next((name for t in node.targets if isinstance(t, ast.Subscript) and (name := _own(t.value))), "")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ADDS:
        held = node.func.value
        return _own(held.value if isinstance(held, ast.Subscript) else held)
    return ""


def _own(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self" else ""


def _made_empty(owner: ast.ClassDef) -> set[str]:
    """Attributes that the constructor makes as empty containers."""
    found: set[str] = set()
    for method in (n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"):
        for node in syntax.own_nodes(method):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and _is_empty(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(name for target in targets if (name := _own(target)))
    return found


def _is_empty(node: ast.expr) -> bool:
    if isinstance(node, (ast.List, ast.Set)):
        return not node.elts
    if isinstance(node, ast.Dict):
        return not node.keys
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in EMPTY_CALLS and not any(k.arg == "maxlen" for k in node.keywords)


def _emptied(tree: ast.Module) -> set[str]:
    """Attributes that are emptied, made anew outside of a constructor, or whose length is asked for somewhere in the file."""
    constructors = {id(n) for f in syntax.nodes(tree) if isinstance(f, ast.FunctionDef) and f.name == "__init__" for n in ast.walk(f)}
    found: set[str] = set()
    for node in syntax.nodes(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and id(node) not in constructors:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(t.attr for t in targets if isinstance(t, ast.Attribute))
        elif isinstance(node, ast.Delete):
            found.update(part.attr for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Attribute))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in EMPTIES:
            found.update(part.attr for part in ast.walk(node.func.value) if isinstance(part, ast.Attribute))
        elif isinstance(node, ast.Compare):
            sizes = [c for c in ast.walk(node) if isinstance(c, ast.Call) and getattr(c.func, "id", "") == "len"]
            found.update(part.attr for call in sizes for part in ast.walk(call) if isinstance(part, ast.Attribute))
    return found
