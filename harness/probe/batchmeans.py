"""An accuracy that is averaged over batches, each with the same weight, as the source of a loop over a loader shows it."""

from __future__ import annotations

import ast
from typing import Any

from . import sites, syntax
from .overwhole import bare, iterated, length


def told(loop: sites.Site) -> dict[str, Any] | None:
    """For an event: the statement in the loop that adds up the batches' means of hits, where the sum is divided by the number of batches behind
    the loop, in its function."""
    tree = syntax.tree(loop[0])
    scope = syntax.function_at(tree, loop[1]) if tree is not None else None
    own = syntax.own_nodes(scope) if scope is not None else ()
    loops = [n for n in own if isinstance(n, ast.For) and n.lineno == loop[1]]
    if not loops:
        return None
    added = [n for n in ast.walk(loops[0]) if isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Add)]
    sums = {ast.unparse(n.target): n.lineno for n in added if _mean_of_hits(n.value)}
    counts = {ast.unparse(n.target) for n in added if isinstance(n.value, ast.Constant) and n.value.value == 1}
    loader = ast.unparse(iterated(loops[0].iter))
    for node in own:
        divided = syntax.division(node)
        if divided is None or getattr(node, "lineno", 0) <= (loops[0].end_lineno or loop[1]):
            continue
        above, below = divided
        if bare(above) in sums and (length(below) == loader or ast.unparse(below) in counts):
            return sites.as_json((loop[0], sums[bare(above)], loop[2]))
    return None


def _mean_of_hits(value: ast.expr) -> bool:
    """`(output.argmax(1) == y).float().mean()`, `.item()` of it; no weight on it."""
    while isinstance(value, ast.Call):
        inner = value.func.value if isinstance(value.func, ast.Attribute) else value.args[0] if value.args else None
        if inner is None:
            return False
        if isinstance(value.func, ast.Attribute) and value.func.attr == "mean":
            return not value.args and any(_is_hit(n) for n in ast.walk(inner))
        value = inner
    return False


def _is_hit(node: ast.AST) -> bool:
    """A prediction against a label; against a number (`activations == 0`) it is a share of something else."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
        return False
    return not any(isinstance(side, ast.Constant) for side in (node.left, *node.comparators))
