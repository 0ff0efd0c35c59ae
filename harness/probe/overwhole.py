"""What a loop over one rank's share has counted, divided by the number of samples of the whole set, as the source shows it."""

from __future__ import annotations

import ast
from typing import Any

from . import sites, syntax

WRAPPERS = {"enumerate", "tqdm", "iter", "track", "trange"}
PLAIN = {"float", "int", "item", "detach", "cpu", "round", "sum"}


def told(loop: sites.Site, made: dict[str, Any] | None) -> dict[str, Any] | None:
    """For an event; `made` is what is known of the loader's making."""
    at = (made or {}).get("made")
    found = divided_at(loop, (at["file"], at["line"], "")) if isinstance(at, dict) else None
    return sites.as_json(found) if found is not None else None


def divided_at(loop: sites.Site, made: sites.Site) -> sites.Site | None:
    """The statement behind the loop, in its function, where `count / len(data set)` is all that is made of a count: not reduced, not scaled.

    `made`: where the loader was made; the data set is what its constructor was given there, or `loader.dataset`.
    """
    tree, other = syntax.tree(loop[0]), syntax.tree(made[0])
    if tree is None or other is None:
        return None
    scope = syntax.function_at(tree, loop[1])
    loops = [n for n in syntax.own_nodes(scope) if isinstance(n, ast.For) and n.lineno == loop[1]]
    if not loops:
        return None
    sets = {f"{ast.unparse(iterated(loops[0].iter))}.dataset", *_given(other, made[1])}
    counted = {ast.unparse(n.target) for n in syntax.nodes(loops[0]) if isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Add)}
    behind = [n for n in syntax.own_nodes(scope) if isinstance(n, ast.expr) and n.lineno > (loops[0].end_lineno or loop[1])]
    found = [n for n in behind if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div) and length(n.right) in sets and bare(n.left) in counted]
    handed = {ast.unparse(a) for n in behind if isinstance(n, ast.Call) and _callee(n) not in PLAIN for a in n.args}  # to a reduction, maybe
    lines = [n.lineno for n in found if bare(n.left) not in handed]
    return (loop[0], min(lines), loop[2]) if lines else None


def iterated(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Call) and _callee(node) in WRAPPERS and node.args:
        node = node.args[0]
    return node


def _given(tree: ast.Module, line: int) -> set[str]:
    """The data set that a loader is made with at this line."""
    calls = [n for n in syntax.nodes(tree) if isinstance(n, ast.Call) and _callee(n).endswith("Loader") and n.lineno <= line <= (n.end_lineno or 0)]
    given = [k.value for c in calls for k in c.keywords if k.arg == "dataset"] + [c.args[0] for c in calls if c.args]
    return {ast.unparse(g) for g in given if isinstance(g, (ast.Name, ast.Attribute))}


def length(node: ast.expr) -> str:
    """The text of X in len(X)."""
    return ast.unparse(node.args[0]) if isinstance(node, ast.Call) and _callee(node) == "len" and node.args else ""


def bare(node: ast.expr) -> str:
    """The name in `count`, `count.item()`, `float(count)`, `100 * count`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = [s for s in (node.left, node.right) if not isinstance(s, ast.Constant)]
        return bare(sides[0]) if len(sides) == 1 else ""
    if isinstance(node, ast.Call) and _callee(node) in PLAIN:
        inner = node.func.value if isinstance(node.func, ast.Attribute) else node.args[0] if node.args else None
        return bare(inner) if inner is not None else ""
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
