"""Whether a sampler of the script's own shows each sample several times in a row and deals the copies out among the ranks, as its source shows it:
repeated augmentation. Ranks may draw equal indices then; what they make of a sample differs.
"""

from __future__ import annotations

import ast
from typing import Any

from . import copyreads, strides, syntax, valuesources

ENTRIES = frozenset({"__init__", "__iter__"})
REPEATING = {"repeat", "repeat_interleave"}
_known: dict[type, bool] = {}


def told(sampler: Any) -> bool:
    kind = type(sampler)
    if kind not in _known:
        if len(_known) >= 32:
            return False
        _known[kind] = _told(sampler)
    return _known[kind]


def _told(sampler: Any) -> bool:
    methods = copyreads.sources(type(sampler), ENTRIES)
    return any(_repeats(method) for _, method in methods) and any(
        _is_own_rank(start, sampler, file) for file, method in methods for _, start, _ in strides.taken(method)
    )


def _repeats(method: ast.FunctionDef) -> bool:
    """`[i for i in order for _ in range(3)]`, the same as two loops, `order[i // 3]`, `[i] * 3`, `np.repeat(order, 3)`."""
    for node in syntax.nodes(method):
        if isinstance(node, ast.Call) and valuesources.callee(node) in REPEATING:
            return True
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.BinOp) and isinstance(node.slice.op, ast.FloorDiv):
            return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.left, ast.List) and _is_one_name(node.left):
            return True
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)) and len(node.generators) > 1 and not _names(node.generators[-1].target) & _names(node.elt):
            return True
        if isinstance(node, ast.For) and any(_only_counts(inner, node) for inner in node.body):
            return True
    return False


def _is_one_name(listed: ast.List) -> bool:
    return len(listed.elts) == 1 and isinstance(listed.elts[0], ast.Name)


def _only_counts(inner: ast.stmt, outer: ast.For) -> bool:
    """A loop that does the same with the outer one's element each time."""
    if not isinstance(inner, ast.For):
        return False
    used = {name for statement in inner.body for name in _names(statement)}
    return bool(used & _names(outer.target)) and not used & _names(inner.target)


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in syntax.nodes(node) if isinstance(n, ast.Name)}


def _is_own_rank(start: ast.expr, sampler: Any, file: str) -> bool:
    """The process's rank: the value of an attribute of the sampler's, or what the source says of it."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return False
    if isinstance(start, ast.Attribute) and isinstance(start.value, ast.Name) and start.value.id == "self":
        value = getattr(sampler, "__dict__", {}).get(start.attr)
        return type(value) is int and value == dist.get_rank()
    tree = syntax.tree(file)
    return tree is not None and strides.is_rank(start, tree, (tree,))
