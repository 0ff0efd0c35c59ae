"""A stride that parts samples among the ranks and is not the number of ranks: `files[rank :: torch.cuda.device_count()]`, `islice(rows, rank, None, 2)`,
`i % 4 == rank`, in the data set's own code or in a line that made it.

The start has to be the rank in the whole world, traced to `get_rank()` or RANK; the stride a number that is known here: written out, or of devices.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from typing import Any

from . import copyreads, cuts, sites, syntax, valuesources

ENTRIES = frozenset({"__init__", "__iter__", "__getitem__", "__getitems__"})


def told(dataset: Any, made: list[Any] | None) -> dict[str, Any] | None:
    """site, step, written (out as a number), of the first such stride; None where there is none, or one process."""
    world = _world_size()
    names = cuts.user_files() if world > 1 else []
    if not names or len(names) > cuts.MAX_FILES:
        return None
    trees = tuple(tree for name in names if (tree := syntax.tree(name)) is not None)
    for file, tree, scope, lines in _places(dataset, made):
        for node, start, step in taken(scope):
            if lines and not any(syntax.spans(node, line) for line in lines):
                continue
            value = number(step, tree, trees)
            if value is not None and value > 0 and value != world and _counted(step) and is_rank(start, tree, trees):
                written = all(isinstance(v, ast.Constant) for v, _, _ in valuesources.of(step, tree, trees) or ())
                return {"site": sites.as_json((file, node.lineno, getattr(scope, "name", ""))), "step": value, "written": written}
    return None


def _world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _places(dataset: Any, made: list[Any] | None) -> Iterator[tuple[str, ast.Module, ast.AST, tuple[int, ...]]]:
    """(file, its syntax, function, its lines; none: all of it) of the data set's methods and of the statements that made it."""
    for file, method in copyreads.sources(type(dataset), ENTRIES):
        tree = syntax.tree(file)
        if tree is not None:
            yield file, tree, method, ()
    for one in made or []:
        file, line = (str(one.get("file")), int(one.get("line", 0))) if isinstance(one, dict) else ("", 0)
        tree = syntax.tree(file) if file else None
        if tree is not None:
            yield file, tree, syntax.function_at(tree, line), (line,)


def taken(scope: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, ast.expr]]:
    """(expression, start, step) of what takes every step-th from start on."""
    for node in syntax.nodes(scope):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and node.slice.lower is not None and node.slice.step is not None:
            yield node, node.slice.lower, node.slice.step
        elif isinstance(node, ast.Call) and valuesources.callee(node) == "islice" and len(node.args) == 4:
            yield node, node.args[1], node.args[3]
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            left = node.left
            if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod):
                yield node, node.comparators[0], left.right


def _counted(step: ast.expr) -> bool:
    """`[rank::1]` is all from the rank on, whatever that is for."""
    return not (isinstance(step, ast.Constant) and step.value == 1)


def is_rank(expression: ast.expr, tree: ast.Module, trees: tuple[ast.Module, ...], depth: int = 3) -> bool:
    """Whether all that an expression may stand for is the process's rank in the whole world (or 0 where there is one process)."""
    found = valuesources.of(expression, tree, trees)
    if not found or not depth:
        return False
    for value, where, _ in found:
        if isinstance(value, ast.IfExp):
            sides = [value.body, value.orelse]
            if not any(is_rank(s, where, trees, depth - 1) for s in sides) or not all(
                (isinstance(s, ast.Constant) and s.value == 0) or is_rank(s, where, trees, depth - 1) for s in sides
            ):
                return False
        elif isinstance(value, ast.Call) and valuesources.callee(value) == "int" and value.args:
            if not is_rank(value.args[0], where, trees, depth - 1):
                return False
        elif not _says_rank(value):
            return False
    return True


def _says_rank(value: ast.expr) -> bool:
    """`dist.get_rank()` of no group, `os.environ["RANK"]`, `os.environ.get("RANK", 0)`, `os.getenv("RANK")`."""
    if isinstance(value, ast.Subscript):
        return ast.unparse(value.value).endswith("environ") and isinstance(value.slice, ast.Constant) and value.slice.value == "RANK"
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func)
    if name.endswith("get_rank"):
        return not value.args and not value.keywords and name in ("get_rank", "dist.get_rank", "torch.distributed.get_rank", "distributed.get_rank")
    return name.endswith(("environ.get", "getenv")) and bool(value.args) and isinstance(value.args[0], ast.Constant) and value.args[0].value == "RANK"


def number(expression: ast.expr, tree: ast.Module, trees: tuple[ast.Module, ...], depth: int = 4) -> int | None:
    """What a stride is in this process; None where the source does not tell, or tells several."""
    found = valuesources.of(expression, tree, trees)
    values = {_worth(value, where, trees, depth - 1) for value, where, _ in found} if found and depth else {None}
    return next(iter(values)) if len(values) == 1 else None


def _worth(value: ast.expr, tree: ast.Module, trees: tuple[ast.Module, ...], depth: int) -> int | None:
    if isinstance(value, ast.Constant):
        return value.value if type(value.value) is int else None
    if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.Or):
        parts = [number(v, tree, trees, depth) for v in value.values]
        return next((p for p in parts if p), parts[-1]) if None not in parts else None
    if isinstance(value, ast.IfExp) and ast.unparse(value.test).endswith("cuda.is_available()"):
        return number(value.body if _devices() else value.orelse, tree, trees, depth)
    if not isinstance(value, ast.Call):
        return None
    name = ast.unparse(value.func)
    if name.endswith("cuda.device_count"):
        return _devices()
    if name in ("max", "min", "int") and value.args and not value.keywords:
        known = [n for a in value.args if (n := number(a, tree, trees, depth)) is not None]
        return {"max": max, "min": min, "int": max}[name](known) if len(known) == len(value.args) else None
    return None


def _devices() -> int:
    """Counted as the script counts them; where it has none, or has counted, that starts nothing on them."""
    import torch

    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or torch.version.cuda is None:
        return 0
    return int(torch.cuda.device_count())
