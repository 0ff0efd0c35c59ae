"""Whether what the ranks are about to add up counts how each row of a rank's share finds its own among the rows of that share alone, as the source
shows it: `x[rank * n : (rank + 1) * n]` on both sides of a product, n being the number of all rows by the number of ranks."""

from __future__ import annotations

import ast

from . import cuts, nonlinear, rankcuts, reaching, sites, syntax, valuesources, worldsizes
from .reaching import Trees

MAX_NODES = 400
UNGRADED = {"no_grad", "inference_mode"}


def look(site: sites.Site, op: str) -> sites.Site | None:
    """The product `queries @ candidates.T` behind what is given to the call at this line, whose best column is compared with `arange(n)`."""
    tree = syntax.tree(site[0]) if site[0] else None
    scope = syntax.function_at(tree, site[1]) if tree is not None else None
    if tree is None or not isinstance(scope, syntax.FUNCTIONS) or not _is_ungraded(scope) or _mentions_gather(scope):
        return None
    calls = [n for n in syntax.own_nodes(scope) if isinstance(n, ast.Call) and valuesources.callee(n) == op and syntax.spans(n, site[1])]
    given = next((g for call in calls if (g := nonlinear.argument(call, 0)) is not None), None)
    behind = _local(given, scope) if given is not None else []
    products = [(n, sides) for n in behind if isinstance(n, ast.expr) and (sides := nonlinear.sides(n)) is not None]
    if not products or not any(_counts_rows(n) for n in behind):
        return None
    files = cuts.user_files()
    trees: Trees = tuple((f, t) for f in files if (t := syntax.tree(f)) is not None) if len(files) <= cuts.MAX_FILES else ()
    for node, sides in products:
        parts = [_local(side, scope) for side in sides]
        if all(_is_share(part, tree, trees) for part in parts) and not rankcuts.in_loop(node, scope):
            return None if any(_exchanges(part, trees) for part in parts) else (site[0], node.lineno, site[2])
    return None


def _local(value: ast.AST, scope: ast.AST) -> list[ast.AST]:
    """The nodes of an expression and of what its names are given in this function; not of what other callers give a function that is called."""
    found: list[ast.AST] = []
    seen: set[int] = set()
    todo = [value]
    while todo and len(found) < MAX_NODES:
        node = todo.pop(0)
        if id(node) in seen:
            continue
        seen.add(id(node))
        found.append(node)
        todo.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            todo.extend(reaching.given(scope).get(node.id, ()))
    return found


def _is_share(part: list[ast.AST], tree: ast.Module, trees: Trees) -> bool:
    """Cut out by the rank, in a size that hangs on the number of ranks: another number of processes makes another number of candidates."""
    for node in part:
        index = node.slice if isinstance(node, ast.Subscript) else None
        bounds = [b for b in (index.lower, index.upper, index.step) if b is not None] if isinstance(index, ast.Slice) else []
        if any(rankcuts.by_rank(b, tree, trees) for b in bounds):
            return any(worldsizes.is_world(n, t, trees) for b in bounds for n, t in reaching.into(b, tree, trees))
    return False


def _exchanges(part: list[ast.AST], trees: Trees) -> bool:
    """A function of the user's that is called on the way gathers from the other ranks."""
    names = {valuesources.callee(n) for n in part if isinstance(n, ast.Call)}
    return any(_mentions_gather(f) for _, tree in trees for f in syntax.functions(tree) if f.name in names)


def _mentions_gather(function: ast.AST) -> bool:
    """A collective of that name, or one that hands rows around; `x.gather(1, index)` is none."""
    calls = [n for n in syntax.own_nodes(function) if isinstance(n, ast.Call)]
    words = ("all_gather", "broadcast", "all_to_all", "send", "recv")
    return any(any(w in valuesources.callee(c) for w in words) or ast.unparse(c.func) in ("dist.gather", "torch.distributed.gather") for c in calls)


def _counts_rows(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and valuesources.callee(node) == "arange" and len(node.args) == 1


def _is_ungraded(function: ast.AST) -> bool:
    """Measured, not trained: pairs within a batch are the task there."""
    marks = [*getattr(function, "decorator_list", ()), *(i.context_expr for n in syntax.own_nodes(function) if isinstance(n, ast.With) for i in n.items)]
    names = {n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", "") for m in marks for n in ast.walk(m)}
    return bool(names & UNGRADED)
