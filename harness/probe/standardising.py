"""Where the script scales values by a mean and a standard deviation of the rows that a rank has cut out for itself, as the source shows it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from . import rankcuts, reaching, sites, syntax, valuesources
from .reaching import Placed, Trees

MEANS = {"mean", "nanmean", "average", "sum", "nansum", "std_mean", "var_mean"}
SPREADS = {"std", "nanstd", "var", "nanvar", "sqrt", "std_mean", "var_mean"}
WRAPPERS = {
    "to", "cuda", "cpu", "float", "double", "type", "astype", "detach", "clone", "view", "reshape", "unsqueeze", "expand", "expand_as", "clamp", "clamp_min",
    "clip", "max", "maximum", "tensor", "as_tensor", "from_numpy", "asarray", "array", "numpy", "where", "squeeze",
}  # fmt: skip
SUBTRACTS = {"sub", "sub_", "subtract"}
MAX_FOUND = 4


class Scaling(NamedTuple):
    """`(values - mean) / std`."""

    applied: sites.Site
    made: sites.Site  # the statement that makes the mean
    mean: ast.expr
    std: ast.expr
    tree: ast.Module


def of_own_cuts(trees: Trees) -> list[Scaling]:
    """Those whose mean and deviation are made once, of what the rank has cut out."""
    found: list[Scaling] = []
    for file, tree in trees:
        for node, mean, std in _applied(tree):
            made = _made(mean, std, tree, trees)
            if made is not None:
                found.append(Scaling(_site(file, tree, node.lineno), made, mean, std, tree))
            if len(found) >= MAX_FOUND:
                return found
    return found


def _made(mean: ast.expr, std: ast.expr, tree: ast.Module, trees: Trees) -> sites.Site | None:
    """Where the mean is made, if it is one of the rank's own cut, and made once."""
    behind = reaching.into(mean, tree, trees)
    sums = [(n, t) for n, t in behind if isinstance(n, ast.Call) and valuesources.callee(n) in MEANS]
    if not sums or not _is_spread(reaching.into(std, tree, trees)) or not rankcuts.is_cut(behind, trees):
        return None
    value, where = _first_given(mean, tree, trees)
    if not rankcuts.runs_once(value, where, trees):
        return None
    scope = syntax.function_at(where, value.lineno)
    here = [n for n, t in sums if isinstance(n, ast.expr) and t is where and syntax.function_at(t, n.lineno) is scope]
    near = next((n for n in here if not rankcuts.in_loop(n, scope)), value)  # a count in a loop over batches is put together behind it
    return _site(next(f for f, t in trees if t is where), where, near.lineno)


def _is_spread(behind: list[Placed]) -> bool:
    for node, _ in behind:
        if isinstance(node, ast.Call) and valuesources.callee(node) in SPREADS:
            return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value == 0.5:
            return True
    return False


def _first_given(mean: ast.expr, tree: ast.Module, trees: Trees) -> tuple[ast.expr, ast.Module]:
    """What is assigned to the mean, through what it is passed as and kept in; the mean itself where it is written out."""
    value, where = mean, tree
    for _ in range(4):
        inner = leaf(value) if value is mean or not isinstance(value, ast.BinOp) else None
        more = reaching.of_name(inner, where, trees) if isinstance(inner, ast.Name) else _kept(inner, trees)
        known = [(v, t) for v, t in more if isinstance(v, ast.expr) and not isinstance(v, ast.Constant)]
        if not known:
            return value, where
        value, where = known[0]
    return value, where


def _kept(inner: ast.expr | None, trees: Trees) -> list[Placed]:
    return list(reaching.of_attribute(inner.attr, trees)) if isinstance(inner, ast.Attribute) else []


def leaf(value: ast.expr) -> ast.expr | None:
    """The name or attribute in `mean`, `self.mean[None]`, `mean.to(device)`, `(std + 1e-8)`, `torch.clamp(std, min=1e-6)`; None for another thing,
    as a reduction is."""
    while True:
        if isinstance(value, (ast.Name, ast.Attribute)):
            return value
        if isinstance(value, ast.Subscript):
            value = value.value
        elif isinstance(value, ast.BinOp):
            value = value.right if isinstance(value.left, ast.Constant) else value.left
        elif isinstance(value, ast.Call) and valuesources.callee(value) in WRAPPERS:
            method = isinstance(value.func, ast.Attribute) and ast.unparse(value.func.value) not in ("torch", "np", "numpy")
            if not method and not value.args:
                return None
            value = value.func.value if method else value.args[0]  # type: ignore[attr-defined]
        else:
            return None


def _applied(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr, ast.expr]]:
    """(where, mean, deviation) of `(x - mean) / std`, `x.sub(mean).div(std)`, `x -= mean; x /= std`, `Normalize(mean, std)`."""
    for node in syntax.nodes(tree):
        divided = syntax.division(node)
        if divided is not None and isinstance(node, (ast.expr, ast.stmt)):
            mean = _taken_off(node, divided[0], tree)
            if mean is not None and _is_scale(mean):
                yield node, mean, divided[1]
        elif isinstance(node, ast.Call) and valuesources.callee(node) == "Normalize" and len(node.args) + len(node.keywords) >= 2:
            by_name = {k.arg: k.value for k in node.keywords}
            given = [*node.args[:2], *(by_name[k] for k in ("mean", "std") if k in by_name)]
            if len(given) == 2 and _is_scale(given[0]):
                yield node, given[0], given[1]


def _taken_off(node: ast.AST, above: ast.expr, tree: ast.Module) -> ast.expr | None:
    """What is subtracted from the values before they are divided."""
    if isinstance(above, ast.BinOp) and isinstance(above.op, ast.Sub):
        return above.right
    if isinstance(above, ast.Call) and valuesources.callee(above) in SUBTRACTS and above.args:
        return above.args[-1]
    if isinstance(node, ast.AugAssign):
        name = ast.unparse(node.target)
        before = [n for n in syntax.own_nodes(syntax.function_at(tree, node.lineno)) if isinstance(n, ast.AugAssign) and n.lineno < node.lineno]
        subtracted = [n for n in before if isinstance(n.op, ast.Sub) and ast.unparse(n.target) == name]
        return max(subtracted, key=lambda n: n.lineno).value if subtracted else None
    return None


def _is_scale(mean: ast.expr) -> bool:
    """One for all rows: not picked by a row's site or class, and no constant."""
    if isinstance(mean, ast.Subscript):
        index = mean.slice
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        return all(isinstance(p, (ast.Slice, ast.Constant)) for p in parts)
    return not isinstance(mean, ast.Constant)


def _site(file: str, tree: ast.Module, line: int) -> sites.Site:
    return (file, line, getattr(syntax.function_at(tree, line), "name", ""))
