"""Whether what the ranks are about to add up is the best of several candidates, chosen by each rank for itself, as the source shows it."""

from __future__ import annotations

import ast
from typing import Any

from . import protocol, sites, syntax
from .nonlinear import Place, argument, calls

BEST = {"argmax", "argmin"}
COLLECTIVES = ("all_reduce", "all_gather", "reduce", "gather", "broadcast", *protocol.GATHER_INTO, "gather_single", "all_gather_object",
               "gather_object", "broadcast_object_list", "reduce_scatter")  # fmt: skip


def look(site: sites.Site, op: str, position: int) -> dict[str, Any] | None:
    """{site (of the choice), scores, chosen (what else is looked up by it)}: `best = scores.argmax()`, with `scores[best]` in what is given
    to the call at this line and another thing indexed by `best` in the function, where no collective comes before the choice."""
    tree = syntax.tree(site[0]) if site[0] else None
    if tree is None:
        return None
    place = Place(tree, syntax.function_at(tree, site[1]), site[1], [])
    own = syntax.own_nodes(place.scope)
    given = next((g for call in calls(place, op) if (g := argument(call, position)) is not None), None)
    if given is None:
        return None
    taken = {ast.unparse(n) for part in _behind(given, own, site[1]) for n in ast.walk(part) if isinstance(n, ast.Subscript)}
    first = min((n.lineno for n in own if isinstance(n, ast.Call) and _callee(n) in COLLECTIVES), default=site[1])
    for node in (n for n in own if isinstance(n, ast.Assign) and n.lineno < first):
        scores, name = _scores(node.value), node.targets[0]
        if not scores or not isinstance(name, ast.Name) or f"{scores}[{name.id}]" not in taken:
            continue
        others = {ast.unparse(n.value) for n in own if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Name) and n.slice.id == name.id} - {scores}
        if others:
            return {"site": sites.as_json((site[0], node.lineno, site[2])), "scores": scores, "chosen": sorted(others)[0]}
    return None


def _scores(value: ast.expr) -> str:
    """The text of X in `X.argmax()`, `torch.argmax(X)`, `int(X.argmax())`, `X.argmax().item()`; over all of it, not along a dimension."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and _callee(node) in BEST and not node.keywords and isinstance(node.func, ast.Attribute):
            if not node.args and isinstance(node.func.value, (ast.Name, ast.Attribute)):
                return ast.unparse(node.func.value)
            if len(node.args) == 1 and isinstance(node.args[0], (ast.Name, ast.Attribute)) and ast.unparse(node.func.value) in ("torch", "np", "numpy"):
                return ast.unparse(node.args[0])
    return ""


def _behind(given: ast.expr, own: tuple[ast.AST, ...], line: int) -> list[ast.expr]:
    """The expression itself, and what its names were given before."""
    names = {n.id for n in ast.walk(given) if isinstance(n, ast.Name)}
    made = [n.value for n in own if isinstance(n, ast.Assign) and n.lineno < line and any(isinstance(t, ast.Name) and t.id in names for t in n.targets)]
    return [given, *made]


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
