"""A stream that draws its samples, or its shards, with replacement: every rank from all of them, so that the same one on two ranks is chance."""

from __future__ import annotations

import ast
from typing import Any

from . import copyreads, syntax, valuesources

ENTRIES = frozenset({"__iter__"})
# of the random module, of numpy and of torch; a shuffle, a permutation or a sample is none of them
WITH_REPLACEMENT = {"randrange", "randint", "choice", "choices", "integers", "random_integers", "multinomial"}


def told(dataset: Any) -> bool:
    """Whether `__iter__`, or what it calls on self, takes what it yields by such a draw: as an index, a key, or an element of a collection."""
    return any(_drawn_from(method) for _, method in copyreads.sources(type(dataset), ENTRIES))


def _drawn_from(method: ast.FunctionDef) -> bool:
    draws = [n for n in syntax.nodes(method) if isinstance(n, ast.Call) and _replaces(n)]
    if any(valuesources.callee(n) in ("choice", "choices") for n in draws):
        return True
    named = {target.id for n in syntax.nodes(method) for target in _bound(n, draws) if isinstance(target, ast.Name)}
    replaced = {ast.unparse(n) for n in syntax.nodes(method) if isinstance(n, ast.Subscript) and isinstance(n.ctx, (ast.Store, ast.Del))}
    return any(_reads(n, draws, named) and not _takes_out(n, replaced) for n in syntax.nodes(method))


def _takes_out(node: ast.AST, replaced: set[str]) -> bool:
    """A shuffle buffer's `pool.pop(i)`, and `pool[i]` where another row is put in its place, or it is deleted: no row is taken twice."""
    if isinstance(node, ast.Call):
        return valuesources.callee(node) == "pop" and isinstance(node.func, ast.Attribute)
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name) and ast.unparse(node) in replaced


def _bound(node: ast.AST, draws: list[ast.Call]) -> list[ast.expr]:
    """What a statement binds to a drawn number, or to one after the other."""
    if isinstance(node, ast.Assign):
        return node.targets if any(part in draws for part in ast.walk(node.value)) else []
    return [node.target] if isinstance(node, ast.For) and any(part in draws for part in ast.walk(node.iter)) else []


def _replaces(call: ast.Call) -> bool:
    """`choice(..., replace=False)` and a multinomial without `replacement=True` take each one once."""
    name = valuesources.callee(call)
    given = {k.arg: k.value for k in call.keywords}
    one = given.get("replace", given.get("replacement"))
    flag = one.value if isinstance(one, ast.Constant) else None
    return name in WITH_REPLACEMENT and (flag is True if name == "multinomial" else flag is not False)


def _reads(node: ast.AST, draws: list[ast.Call], named: set[str]) -> bool:
    """An element by a drawn index, or a call that is given one: `self.shards[i]`, `read_shard(i)`, `manual_seed(9000 + shard)`."""
    given = [node.slice] if isinstance(node, ast.Subscript) else [*node.args, *(k.value for k in node.keywords)] if isinstance(node, ast.Call) else []
    for part in (inner for one in given if not isinstance(one, ast.Slice) for inner in ast.walk(one)):
        if part in draws or (isinstance(part, ast.Name) and part.id in named):
            return True
    return False
