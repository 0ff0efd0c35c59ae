"""Losses made of nothing but what was summed over the ranks in place and divided by their number: autograd knows the division and not the sum."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

from . import quotients, sites, syntax
from .nonlinear import RANKS

TINY = 1e-6
Key = tuple[int, str]


def key_of(node: Any) -> Key:
    """Which operation of the graph it is, without keeping it: numbered as they ran."""
    return int(node._sequence_nr()), type(node).__name__


def side(loss: Any, reduced: set[Key], ranks: int) -> str:
    """Whether what was reduced is divided by the number of ranks "before" or "after" it, alone and once, in a loss that comes of nothing else.
    Empty else, and where the graph cannot be read to the end."""
    try:
        return _side(loss.grad_fn, reduced, ranks)
    except quotients.Unreadable:
        return ""


def _side(root: Any, reduced: set[Key], ranks: int) -> str:
    todo, seen, ends, direct = [root], set[Key](), dict[Key, float](), list[float]()
    factors: list[float] = []
    visits = [0, 0]
    while todo:
        node = todo.pop()
        key = key_of(node)
        if key in seen:
            continue
        seen.add(key)
        if key not in reduced and (type(node).__name__ in quotients.MODEL or not node.next_functions):
            return ""  # a part of the loss that is the rank's own
        quotients.visit(node, visits)
        factor = _factor(node, visits)
        if key in reduced:
            ends[key] = factor
            continue
        following = [n for n, _ in node.next_functions if n is not None]
        (direct if any(key_of(n) in reduced for n in following) else factors).append(factor)
        todo += following
    before = [_is(f, 1 / ranks) for f in ends.values()]
    after = [_is(f, 1 / ranks) for f in direct]
    if not ends or any(_scales(f, ranks) for f in (*factors, *(f for f, own in zip(direct, after, strict=True) if not own))):
        return ""
    if all(before) and not any(after):
        return "before"
    return "after" if after and all(after) and not any(before) and not any(_scales(f, ranks) for f in ends.values()) else ""


def _factor(node: Any, visits: list[int]) -> float:
    number = quotients.number_of(node, visits)
    if number is None:
        return 1.0
    return number[1] if type(node).__name__ == "MulBackward0" else 1 / number[1] if number[1] else 0.0


def _is(factor: float, wanted: float) -> bool:
    return abs(factor - wanted) <= TINY


def _scales(factor: float, ranks: int) -> bool:
    """A factor that may hold the number of ranks, and so make up for it."""
    return abs(factor) >= 1 + TINY and abs(factor / ranks - round(factor / ranks)) <= TINY


@cache
def sides(file: str, line: int) -> frozenset[str]:
    """Where the source divides what this all_reduce sums up by the number of ranks: a quotient of the same value may be another number's."""
    tree = syntax.tree(file)
    if tree is None:
        return frozenset()
    nodes = syntax.own_nodes(syntax.function_at(tree, line))
    names = {ast.unparse(n.args[0]) for n in nodes if isinstance(n, ast.Call) and syntax.spans(n, line) and _is_reduction(n) and n.args}
    found: set[str] = set()
    last: ast.stmt | None = None
    for node in sorted((n for n in nodes if isinstance(n, ast.stmt)), key=lambda n: n.lineno):
        if node.lineno < line and _target(node) in names:
            last = node
        elif (node.lineno > line and _target(node) in names) or isinstance(node, ast.Return):
            found |= {"after"} if node.lineno > line and _by_ranks(node, names) else set()
    return frozenset(found | ({"before"} if last is not None and _by_ranks(last, None) else set()))


def divided_at(site: sites.Site) -> bool:
    """A statement that divides what a call of it gives back by the number of ranks."""
    tree = syntax.tree(site[0])
    for node in syntax.own_nodes(syntax.function_at(tree, site[1])) if tree is not None else ():
        divided = syntax.division(node) if isinstance(node, ast.expr) and syntax.spans(node, site[1]) else None
        if divided is not None and isinstance(divided[0], ast.Call) and _of_ranks(divided[1]):
            return True
    return False


def _is_reduction(call: ast.Call) -> bool:
    return (call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")) == "all_reduce"


def _target(node: ast.stmt) -> str:
    """ "loss" of `loss = ...`, `loss /= ...` and `loss.div_(...)`."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return ast.unparse(node.targets[0])
    if isinstance(node, ast.AugAssign):
        return ast.unparse(node.target)
    call = node.value if isinstance(node, ast.Expr) else None
    return ast.unparse(call.func.value) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "div_" else ""


def _by_ranks(node: ast.stmt, names: set[str] | None) -> bool:
    """Whether the statement's whole value is a quotient by the number of ranks, of one of these."""
    value = node if isinstance(node, ast.AugAssign) else getattr(node, "value", None)
    divided = syntax.division(value) if value is not None else None
    return divided is not None and _of_ranks(divided[1]) and (names is None or ast.unparse(divided[0]) in names)


def _of_ranks(node: ast.expr) -> bool:
    return bool(RANKS.search(ast.unparse(node).lower()))
