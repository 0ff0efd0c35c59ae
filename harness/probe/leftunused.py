"""Whether what a statement gives a name is used by nothing, as the source shows it."""

from __future__ import annotations

import ast
from functools import cache

from . import sites, syntax


@cache
def told(site: sites.Site) -> bool:
    """The statement assigns to names of its function, and one of them is read nowhere there but in comparisons (`if ema_state is not None`)."""
    tree = syntax.tree(site[0]) if site[0] else None
    scope = syntax.function_at(tree, site[1]) if tree is not None else None
    if scope is None or isinstance(scope, ast.Module):  # a module's names may be read from anywhere
        return False
    given = [n for n in syntax.own_nodes(scope) if isinstance(n, (ast.Assign, ast.AnnAssign)) and syntax.spans(n, site[1])]
    targets = [t for n in given for target in (n.targets if isinstance(n, ast.Assign) else [n.target]) for t in _single(target)]
    if not targets or not all(isinstance(t, ast.Name) for t in targets):
        return False
    nodes = syntax.nodes(scope)
    compared = {id(part) for n in nodes if isinstance(n, ast.Compare) for part in (n.left, *n.comparators)}
    used = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and id(n) not in compared}
    return any(t.id not in used for t in targets if isinstance(t, ast.Name))


def _single(target: ast.expr) -> list[ast.expr]:
    return [t for e in target.elts for t in _single(e)] if isinstance(target, (ast.Tuple, ast.List)) else [target]
