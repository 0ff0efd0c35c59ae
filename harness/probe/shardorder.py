"""Whether rows that are gathered rank after rank are taken for the rows of the data set in its own order, as the source shows it."""

from __future__ import annotations

import ast

from . import sites, syntax

JOINS = ("cat", "concat", "concatenate")
MAX_DEPTH = 6


def numbered(site: sites.Site) -> sites.Site | None:
    """The statement that joins the parts gathered at this line (`rows = torch.cat(parts)`), where in the same function a product of `rows` with
    something that was not gathered is compared with `arange(...)`: row i has to be sample i then."""
    tree = syntax.tree(site[0]) if site[0] else None
    if tree is None:
        return None
    own = sorted((n for n in syntax.own_nodes(syntax.function_at(tree, site[1])) if hasattr(n, "lineno")), key=lambda n: n.lineno)
    calls = [n for n in own if isinstance(n, ast.Call) and "gather" in _callee(n) and n.args and isinstance(n.args[0], ast.Name)]
    lists = {n.args[0].id for n in calls}  # type: ignore[attr-defined]
    given = [(t.id, n) for n in own if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
    turned = {name for name, n in given if n.lineno > site[1]}  # the list itself is put in order before it is joined
    here = {n.args[0].id for n in calls if syntax.spans(n, site[1])} - turned  # type: ignore[attr-defined]
    made = dict(given)
    joined = {name for name in made if all(_joins(n.value, here) for other, n in given if other == name)}  # put in order afterwards: another thing
    for node in (n for n in own if isinstance(n, ast.Compare) and len(n.ops) == 1 and isinstance(n.ops[0], ast.Eq)):
        sides = [node.left, node.comparators[0]]
        if not any(_is_arange(s, made) for s in sides):
            continue
        for name in sorted(joined):
            if any(_product(s, name, lists, made, MAX_DEPTH) for s in sides):
                return (site[0], made[name].lineno, site[2])
    return None


def _joins(value: ast.expr, lists: set[str]) -> bool:
    """`torch.cat(parts)` of the list itself, along the rows; parts that are turned, indexed or sorted are another order."""
    if not isinstance(value, ast.Call) or _callee(value) not in JOINS or not value.args:
        return False
    rest = [*value.args[1:], *(k.value for k in value.keywords)]
    return isinstance(value.args[0], ast.Name) and value.args[0].id in lists and all(isinstance(r, ast.Constant) and r.value == 0 for r in rest)


def _is_arange(node: ast.expr, made: dict[str, ast.Assign]) -> bool:
    if isinstance(node, ast.Name) and node.id in made:
        node = made[node.id].value
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda", "cpu", "long"):
        node = node.func.value
    return isinstance(node, ast.Call) and _callee(node) == "arange" and len(node.args) == 1


def _product(node: ast.AST, name: str, lists: set[str], made: dict[str, ast.Assign], depth: int) -> bool:
    """Whether the best column of `name @ other` for each row stands behind an expression."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.MatMult) and isinstance(inner.left, ast.Name) and inner.left.id == name:
            return not _gathered(inner.right, lists, made, MAX_DEPTH) and not _picked(inner.right, made, MAX_DEPTH)
        made_of = made[inner.id].value if isinstance(inner, ast.Name) and inner.id in made and inner.id != name else None
        if made_of is not None and depth and made_of is not node and _product(made_of, name, lists, made, depth - 1):
            return True
    return False


def _gathered(node: ast.AST, lists: set[str], made: dict[str, ast.Assign], depth: int) -> bool:
    """Whether the other factor is of what was gathered as well: then both are in one order."""
    for inner in (n for n in ast.walk(node) if isinstance(n, ast.Name)):
        if inner.id in lists or (depth and inner.id in made and _gathered(made[inner.id].value, lists, made, depth - 1)):
            return True
    return any(isinstance(n, ast.Call) and "gather" in _callee(n) for n in ast.walk(node))


def _picked(node: ast.AST, made: dict[str, ast.Assign], depth: int) -> bool:
    """Whether the other factor's rows are picked by an index (`texts[order]`), maybe in the order in which the samples were dealt out."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Subscript) and any(isinstance(n, ast.Name) for n in ast.walk(inner.slice)):
            return True
        if isinstance(inner, ast.Call) and _callee(inner) in ("index_select", "take_along_dim", "permute"):
            return True
        if depth and isinstance(inner, ast.Name) and inner.id in made and _picked(made[inner.id].value, made, depth - 1):
            return True
    return False


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
