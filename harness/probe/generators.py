"""The loop over a generator that a stack stands in: who draws from it may leave it early, and what it would still have called is never called."""

from __future__ import annotations

import ast
from itertools import pairwise
from typing import Any

from . import origins, sites, syntax

MAX_FRAMES = 6
WHOLE = ("dict", "frozenset", "list", "max", "min", "set", "sorted", "sum", "tuple")  # they draw all before the first turn


def consumer(stack: list[sites.Site]) -> dict[str, Any] | None:
    """`loop`: the header of the innermost loop that draws from a generator among these frames (innermost first), `exits`: the conditions that leave it,
    `name`: of the generator."""
    for inner, outer in pairwise(stack[:MAX_FRAMES]):
        tree, around = syntax.tree(inner[0]), syntax.tree(outer[0])
        if tree is None or around is None or not _yields(syntax.function_at(tree, inner[1])):
            continue
        loop = next(iter(origins.loops_around(around, outer[1])), None)
        if loop is None or not _draws(loop, outer[1]):
            continue
        ways = [e for e in origins.loops([outer])["exits"] if e["level"] == 0 and e["kind"] in ("break", "return")]
        return {"loop": sites.as_json((outer[0], loop.lineno, outer[2])), "exits": [e["site"] for e in ways][:8], "name": inner[2]}
    return None


def holds(site: sites.Site) -> bool:
    """Whether a statement is one of a generator."""
    tree = syntax.tree(site[0]) if site[0] else None
    return tree is not None and _yields(syntax.function_at(tree, site[1]))


def _yields(scope: syntax.Function) -> bool:
    return isinstance(scope, syntax.FUNCTIONS) and any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in syntax.own_nodes(scope))


def _draws(loop: ast.For | ast.While, line: int) -> bool:
    """Whether the loop takes its next turn at this line: in its header, or by `next()`."""
    if isinstance(loop, ast.For) and loop.lineno <= line <= (loop.iter.end_lineno or loop.lineno):
        return not (isinstance(loop.iter, ast.Call) and getattr(loop.iter.func, "id", "") in WHOLE)
    calls = (n for n in syntax.nodes(loop) if isinstance(n, ast.Call) and syntax.spans(n, line))
    return any(getattr(n.func, "id", "") == "next" for n in calls)
