"""Where the user's source writes into a parameter by its name: `self.base.weight += d`, `layer.weight.data.copy_(w)`."""

from __future__ import annotations

import ast
from functools import cache

from . import syntax
from .sites import Site

NO_WRITES = ("requires_grad_", "share_memory_", "detach_")


@cache
def place(file: str, name: str) -> Site | None:
    """The first one outside of constructors that names the parameter's owner too; of those that do not, the only one."""
    tree = syntax.tree(file)
    owner, _, attribute = name.rpartition(".")
    found = [n for n in (syntax.nodes(tree) if tree is not None else ()) if isinstance(n, ast.Attribute) and n.attr == attribute]
    return None if tree is None or not found else _best(file, tree, sorted(found, key=lambda n: n.lineno), owner.rpartition(".")[2])


def _best(file: str, tree: ast.Module, found: list[ast.Attribute], owner: str) -> Site | None:
    written = {id(n): line for line, n in _written(tree)}
    own: list[Site] = []
    others: list[Site] = []
    for node in found:
        if (line := written.get(id(node))) is None:
            continue
        scope = getattr(syntax.function_at(tree, line), "name", "")
        if scope != "__init__":
            (own if getattr(node.value, "attr", getattr(node.value, "id", "")) == owner else others).append((file, line, scope))
    return own[0] if own else others[0] if len(others) == 1 else None


def _written(tree: ast.Module) -> list[tuple[int, ast.expr]]:
    """(line, what is written to), without `.data`, `[...]` and `.detach()` around it."""
    found = []
    for node in syntax.nodes(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Assign):
            targets = [t for t in node.targets if isinstance(t, ast.Subscript) or getattr(t, "attr", "") == "data"]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _in_place(node.func.attr):
            targets = [node.func.value]
        found += [(node.lineno, _bare(t)) for t in targets]  # type: ignore[attr-defined]
    return found


def _in_place(method: str) -> bool:
    return method.endswith("_") and not method.endswith("__") and method not in NO_WRITES


def _bare(node: ast.expr) -> ast.expr:
    while True:
        if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach":
            node = node.func.value
        else:
            return node
