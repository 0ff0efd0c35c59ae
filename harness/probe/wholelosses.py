"""Where the script divides its loss by the number of ranks, or by the batch of all ranks, as the source shows it on the way to a backward."""

from __future__ import annotations

import ast

from . import reaching, sites, syntax, valuesources, worldsizes
from .reaching import Trees

THROUGH = {"mean", "sum", "to", "float", "double", "squeeze", "view", "reshape", "contiguous", "clone"}
MAX_DEPTH = 8


def differentiated(site: sites.Site, trees: Trees) -> tuple[ast.expr, ast.Module] | None:
    """What the backward at this line is called on: `loss` of `loss.backward()`, `scaler.scale(loss).backward()`, `accelerator.backward(loss)`."""
    tree = syntax.tree(site[0])
    for call in syntax.own_nodes(syntax.function_at(tree, site[1])) if tree is not None else ():
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and syntax.spans(call, site[1]):
            loss = call.args[0] if call.args else call.func.value
            if isinstance(loss, ast.Call) and valuesources.callee(loss) == "scale" and loss.args:
                loss = loss.args[0]
            return (loss, tree) if tree is not None else None
    return None


def by_ranks(site: sites.Site, trees: Trees) -> sites.Site | None:
    """The statement that divides the whole of the loss by the number of ranks."""
    start = differentiated(site, trees)
    return _whole(*start, trees, site[1], MAX_DEPTH) if start is not None else None


def _whole(node: ast.AST, tree: ast.Module, trees: Trees, before: int, depth: int) -> sites.Site | None:
    """Down from the outermost operation, as long as it is a quotient, a product or a call that gives back one."""
    if not depth:
        return None
    divided = syntax.division(node) if isinstance(node, ast.expr) else None
    if divided is not None:
        if worldsizes.is_world(divided[1], tree, trees):
            return None if _adds_up(divided[0], tree) else _site(node, tree, trees)
        return _whole(divided[0], tree, trees, before, depth - 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _whole(node.left, tree, trees, before, depth - 1) or _whole(node.right, tree, trees, before, depth - 1)
    if isinstance(node, ast.Name):
        return _named(node, tree, trees, before, depth)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in THROUGH and not reaching.results(node, tree, trees):
            return _whole(node.func.value, tree, trees, before, depth - 1)
        returned = reaching.results(node, tree, trees)
        return _returned(returned, 0, trees, depth)
    return None


def _returned(results: list[reaching.Placed], place: int, trees: Trees, depth: int) -> sites.Site | None:
    """Every result has to be divided, or a branch that was not taken may be the one."""
    found: list[sites.Site] = []
    for value, tree in results:
        one = value.elts[place] if isinstance(value, ast.Tuple) and place < len(value.elts) else value
        at = _whole(one, tree, trees, getattr(one, "lineno", 0) + 1, depth - 1)
        if at is None:
            return None
        found.append(at)
    return found[0] if found else None


def _named(name: ast.Name, tree: ast.Module, trees: Trees, before: int, depth: int) -> sites.Site | None:
    """By the last statement before that writes to the name; by the callers, where there is none."""
    scope = syntax.function_at(tree, name.lineno)
    if _adds_up(name, tree):
        return None
    wrote = [n for n in syntax.own_nodes(scope) if isinstance(n, ast.stmt) and n.lineno < before and (_writes(n, name.id) or _divides_in_place(n, name.id))]
    for node in sorted(wrote, key=lambda n: -n.lineno):
        if isinstance(node, ast.AugAssign):
            if isinstance(node.op, ast.Div) and worldsizes.is_world(node.value, tree, trees):
                return _site(node, tree, trees)
            if not isinstance(node.op, (ast.Div, ast.Mult)):
                return None
        elif isinstance(node, ast.Expr):
            divided = syntax.division(node.value)
            if divided is not None and worldsizes.is_world(divided[1], tree, trees):
                return _site(node, tree, trees)
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Tuple):
                place = [getattr(e, "id", "") for e in target.elts].index(name.id)
                return _returned(reaching.results(node.value, tree, trees), place, trees, depth - 1) if isinstance(node.value, ast.Call) else None
            return _whole(node.value, tree, trees, node.lineno, depth - 1)
    if wrote or not isinstance(scope, syntax.FUNCTIONS):
        return None
    passed = reaching.of_name(name, tree, trees)
    return _whole(passed[0][0], passed[0][1], trees, getattr(passed[0][0], "lineno", 0) + 1, depth - 1) if len(passed) == 1 else None


def _adds_up(value: ast.AST, tree: ast.Module) -> bool:
    """A sum of as many terms as there are ranks, one for what came from each, may be divided by their number to be a mean."""
    if isinstance(value, ast.Call) and valuesources.callee(value) in ("sum", "fsum", "stack"):
        return True
    if not isinstance(value, ast.Name):
        return False
    for node in syntax.own_nodes(syntax.function_at(tree, value.lineno)):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name) and node.target.id == value.id:
            return True
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == value.id for t in node.targets) and _sums(node.value, value.id):
            return True
    return False


def _sums(value: ast.expr, name: str) -> bool:
    """`loss = sum(terms)`, `loss = loss + term`."""
    if isinstance(value, ast.Call):
        return valuesources.callee(value) in ("sum", "fsum", "stack")
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(value))


def _writes(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    if not isinstance(node, ast.Assign):
        return False
    parts = [e for t in node.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return any(isinstance(p, ast.Name) and p.id == name for p in parts)


def _divides_in_place(node: ast.stmt, name: str) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    owner = call.func if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
    return owner is not None and owner.attr == "div_" and isinstance(owner.value, ast.Name) and owner.value.id == name


def by_whole_batch(site: sites.Site, trees: Trees) -> sites.Site | None:
    """Where the way to the loss divides by what is divided by the number of ranks to make the loader's batch size: the quotient, or the statement
    that gives this number another name."""
    names = worldsizes.whole_batches(trees)
    start = differentiated(site, trees) if names else None
    for node, tree in reaching.into(*start, trees) if start is not None else ():
        divided = syntax.division(node)
        at = worldsizes.named(divided[1], names, tree, trees) if divided is not None else None
        if at is not None:
            return _site(*at, trees)
    return None


def _site(node: ast.AST, tree: ast.Module, trees: Trees) -> sites.Site:
    line = getattr(node, "lineno", 0)
    return (next(f for f, t in trees if t is tree), line, getattr(syntax.function_at(tree, line), "name", ""))
