"""Whether the numbers that an attribute gives to names stay with the script: compared, sorted by, divided, or places in a table beside them.

Such numbers are ranks, rows of a cache, ages. Numbers that are put into a list, a tensor or a return value may be what the model is fed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from . import syntax

READS, BUILDS, ASKS = {"get", "__getitem__", "pop"}, {"setdefault", "update"}, {"len", "bool"}
MEASURES = {"log", "log2", "log1p", "sqrt", "exp", "pow"}
Parents = dict[ast.AST, ast.AST]


def stay_inside(attribute: str, files: Iterable[str]) -> tuple[bool, set[str]]:
    """(every use of the attribute in these files is of that kind, names of the tables that its numbers are places in)."""
    tables: set[str] = set()
    seen = 0
    for tree in map(syntax.tree, files):
        if tree is None:
            return False, set()
        reads = [n for n in syntax.nodes(tree) if isinstance(n, ast.Attribute) and n.attr == attribute and isinstance(n.ctx, ast.Load)]
        parents = {child: node for node in syntax.nodes(tree) for child in ast.iter_child_nodes(node)} if reads else {}
        seen += len(reads)
        if not all(_inside(n, parents, tree, tables) for n in reads):
            return False, set()
    return seen > 0, tables


def _inside(node: ast.AST, parents: Parents, tree: ast.Module, tables: set[str]) -> bool:
    above = parents.get(node)
    if isinstance(above, ast.Compare) and node in above.comparators:
        return True  # `word in self.index`
    if isinstance(above, ast.Call) and node in above.args:
        return isinstance(above.func, ast.Name) and above.func.id in ASKS
    if isinstance(above, ast.Subscript) and above.value is node:
        return not isinstance(above.ctx, ast.Load) or _number_stays(above, parents, tree, tables)
    if isinstance(above, ast.Attribute):
        call = parents.get(above)
        if above.attr in READS and isinstance(call, ast.keyword):
            return call.arg == "key"  # `sorted(words, key=self.order.get)`
        if isinstance(call, ast.Call) and call.func is above and above.attr in READS | BUILDS:
            unused = isinstance(parents.get(call), ast.Expr)
            return unused or (above.attr != "update" and _number_stays(call, parents, tree, tables))
    return False


def _number_stays(node: ast.AST, parents: Parents, tree: ast.Module, tables: set[str], follow: bool = True) -> bool:
    above = parents.get(node)
    while isinstance(above, ast.UnaryOp) or (isinstance(above, ast.BinOp) and not isinstance(above.op, (ast.Div, ast.Pow))):
        node, above = above, parents.get(above)
    if isinstance(above, (ast.Compare, ast.BinOp, ast.FormattedValue)):
        return True  # a quotient is a weight, no index
    if isinstance(above, ast.Call) and node in above.args:
        return (above.func.attr if isinstance(above.func, ast.Attribute) else getattr(above.func, "id", "")) in MEASURES
    if isinstance(above, ast.Lambda):
        keyword = parents.get(above)
        return isinstance(keyword, ast.keyword) and keyword.arg == "key"
    if isinstance(above, ast.Subscript) and above.slice is node and isinstance(above.value, ast.Attribute) and isinstance(above.value.value, ast.Name):
        tables.add(above.value.attr)
        return True
    if follow and isinstance(above, ast.Assign) and above.value is node and all(isinstance(t, ast.Name) for t in above.targets):
        names = {t.id for t in above.targets if isinstance(t, ast.Name)}
        scope = syntax.nodes(syntax.function_at(tree, above.lineno))
        uses = [n for n in scope if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)]
        return all(_number_stays(n, parents, tree, tables, follow=False) for n in uses)
    return False
