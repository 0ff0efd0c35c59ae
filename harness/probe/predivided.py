"""Whether what the ranks are about to add up is divided by their number already, as the source shows it: then the sum is a mean.

Followed from the call of the collective back through assignments and, out of a helper, to all of its callers. Read once a call site, a few ms.
`behind`: what scales it afterwards.
"""

from __future__ import annotations

import ast

from . import sites, syntax, worldsizes
from .nonlinear import MODULES, RANKS, THROUGH, Place, argument, assigned, callee, calls, position

MAX_DEPTH = 8


def look(site: sites.Site, op: str) -> bool:
    tree = syntax.tree(site[0]) if site[0] else None
    if tree is None:
        return False
    place = Place(tree, syntax.function_at(tree, site[1]), site[1], [])
    given = next(((call, g) for call in calls(place, op) if (g := argument(call, 0)) is not None), None)
    return given is not None and _is_part(given[1], place._replace(line=given[0].lineno - 1), MAX_DEPTH)


def behind(site: sites.Site, op: str) -> sites.Site | None:
    """The statement behind a reduction, in its function, that divides or multiplies what was given by something else than a constant or the number of
    ranks; None where there are several."""
    tree = syntax.tree(site[0]) if site[0] else None
    if tree is None:
        return None
    place = Place(tree, syntax.function_at(tree, site[1]), site[1], [])
    given = next(((call, g) for call in calls(place, op) if (g := argument(call, 0)) is not None), None)
    if given is None:
        return None
    last, name = given[0].end_lineno or given[0].lineno, ast.unparse(given[1]).removesuffix(".data")
    found = {node.lineno for node in syntax.own_nodes(place.scope) if _scales(node, name, tree) and node.lineno > last}  # type: ignore[attr-defined]
    return (site[0], found.pop(), site[2]) if len(found) == 1 else None


def _scales(node: ast.AST, name: str, tree: ast.Module) -> bool:
    scaled = syntax.division(node)
    if isinstance(node, (ast.AugAssign, ast.BinOp)) and isinstance(node.op, ast.Mult):
        scaled = (node.target, node.value) if isinstance(node, ast.AugAssign) else (node.left, node.right)
    elif isinstance(node, ast.Call) and callee(node) in ("mul", "mul_") and isinstance(node.func, ast.Attribute) and node.args:
        scaled = node.func.value, node.args[0]
    if scaled is None or ast.unparse(scaled[0]).removesuffix(".data") != name:
        return False
    return not isinstance(scaled[1], ast.Constant) and not _is_ranks(scaled[1], tree)


def _is_part(node: ast.expr, place: Place, depth: int) -> bool:
    if not depth:
        return False
    divided = syntax.division(node)
    if divided is not None:
        return _is_ranks(divided[1], place.tree) or _is_part(divided[0], place, depth - 1)
    if isinstance(node, (ast.List, ast.Tuple)):
        return bool(node.elts) and all(_is_part(e, place, depth - 1) for e in node.elts)
    if isinstance(node, ast.Name):
        return _name(node.id, place, depth)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):  # percent; a product with a count is a weight
        one, other = (node.left, node.right) if isinstance(node.right, ast.Constant) else (node.right, node.left)
        return isinstance(other, ast.Constant) and _is_part(one, place, depth - 1)
    if not isinstance(node, ast.Call) or callee(node) not in THROUGH:
        return False
    method = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") not in MODULES
    inner = node.func.value if method and isinstance(node.func, ast.Attribute) else node.args[0] if node.args else None
    return inner is not None and _is_part(inner, place, depth - 1)


def _name(name: str, place: Place, depth: int) -> bool:
    made = assigned(place, name)
    since = made.lineno if made is not None else 0
    for node in syntax.own_nodes(place.scope):
        if not isinstance(node, ast.AugAssign) and not (isinstance(node, ast.Call) and callee(node) == "div_"):
            continue
        divided = syntax.division(node) if since <= node.lineno <= place.line else None
        if divided is not None and ast.unparse(divided[0]) == name and _is_ranks(divided[1], place.tree):
            return True
    if made is None:
        return _from_callers(name, place, depth)
    value, at = made.value, position(made, name)
    if at >= 0:
        value = value.elts[at] if isinstance(value, ast.Tuple) and at < len(value.elts) else ast.Constant(None)
    return _is_part(value, place._replace(line=made.lineno - 1), depth - 1)


def _from_callers(name: str, place: Place, depth: int) -> bool:
    """A parameter of the function: all that its callers give."""
    function, tree = place.scope, place.tree
    names = [a.arg for a in function.args.args] if isinstance(function, syntax.FUNCTIONS) else []
    if not isinstance(function, syntax.FUNCTIONS) or name not in names:
        return False
    at = names.index(name) - (names[0] in ("self", "cls"))
    callers = [n for n in syntax.nodes(tree) if isinstance(n, ast.Call) and callee(n) == function.name]
    return bool(callers) and all(_passes_part(call, name, at, tree, depth) for call in callers)


def _passes_part(call: ast.Call, name: str, at: int, tree: ast.Module, depth: int) -> bool:
    named = next((k.value for k in call.keywords if k.arg == name), None)
    given = named or (call.args[at] if 0 <= at < len(call.args) else None)
    caller = Place(tree, syntax.function_at(tree, call.lineno), call.lineno - 1, [])
    return given is not None and _is_part(given, caller, depth - 1)


def _is_ranks(divisor: ast.expr, tree: ast.Module) -> bool:
    """The number of ranks itself: `n // world_size` is a rank's part of n."""
    if any(isinstance(n, ast.BinOp) for n in ast.walk(divisor)):
        return False
    return bool(RANKS.search(ast.unparse(divisor).lower())) or worldsizes.is_world(divisor, tree, (("", tree),))
