"""Which numbers of the script are the number of ranks, or the batch of all ranks together, as the source shows it."""

from __future__ import annotations

import ast

from . import reaching, syntax, valuesources
from .reaching import Placed, Trees

NAMES = {"world_size", "WORLD_SIZE", "num_replicas", "nranks", "num_processes"}
ALIASES = 5


def is_world(expression: ast.AST, tree: ast.Module, trees: Trees, depth: int = 4) -> bool:
    """`dist.get_world_size()` of no group, WORLD_SIZE of the environment, a name for it, `max(1, world)`; nothing that it is multiplied into."""
    if isinstance(expression, ast.Call):
        name = valuesources.callee(expression)
        if name == "get_world_size":
            return not expression.args and not expression.keywords
        if name in ("getenv", "get") and expression.args:
            return isinstance(expression.args[0], ast.Constant) and expression.args[0].value == "WORLD_SIZE"
        return name in ("int", "float", "max") and depth > 0 and any(is_world(a, tree, trees, depth - 1) for a in expression.args)
    if isinstance(expression, ast.Subscript):
        return isinstance(expression.slice, ast.Constant) and expression.slice.value == "WORLD_SIZE"
    if not isinstance(expression, (ast.Name, ast.Attribute)) or not depth:
        return False
    own = ast.unparse(expression)
    if any(isinstance(n, ast.AugAssign) and ast.unparse(n.target) == own for n in syntax.nodes(tree)):
        return False  # `accumulation //= world_size`
    given = [(v, t) for v, t in _given(expression, tree, trees) if not _is_one(v)]
    if not given:
        return (expression.id if isinstance(expression, ast.Name) else expression.attr) in NAMES
    return all(is_world(v, t, trees, depth - 1) for v, t in given)


def _is_one(value: ast.AST) -> bool:
    """What a script without a launcher has."""
    return isinstance(value, ast.Constant) and value.value in (1, None)


def _given(expression: ast.Name | ast.Attribute, tree: ast.Module, trees: Trees) -> list[Placed]:
    if isinstance(expression, ast.Name):
        return reaching.of_name(expression, tree, trees)
    return list(reaching.of_attribute(expression.attr, trees))


def whole_batches(trees: Trees) -> set[str]:
    """Names of what is divided by the number of ranks to make the batch size of a loader."""
    parts = {id(node): left for _, tree in trees for node in syntax.nodes(tree) if (left := _shared_out(node, tree, trees))}
    found: set[str] = set()
    for _, tree in trees if parts else ():
        for call in (n for n in syntax.nodes(tree) if isinstance(n, ast.Call) and valuesources.callee(n).endswith(("Loader", "BatchSampler"))):
            sizes = [k.value for k in call.keywords if k.arg == "batch_size"] + call.args[1:2]
            found |= {parts[id(n)] for size in sizes for n, _ in reaching.into(size, tree, trees) if id(n) in parts}
    return found


def _shared_out(node: ast.AST, tree: ast.Module, trees: Trees) -> str:
    """The name of X in `X // world_size`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.FloorDiv, ast.Div)) or not is_world(node.right, tree, trees):
        return ""
    return node.left.id if isinstance(node.left, ast.Name) else node.left.attr if isinstance(node.left, ast.Attribute) else ""


def named(expression: ast.AST, names: set[str], tree: ast.Module, trees: Trees, depth: int = ALIASES) -> Placed | None:
    """Where a number is called by one of these names: here, or where it got the name that it goes by."""
    if not isinstance(expression, (ast.Name, ast.Attribute)) or not depth:
        return None
    if (expression.id if isinstance(expression, ast.Name) else expression.attr) in names:
        return expression, tree
    return next((found for v, t in _given(expression, tree, trees) if (found := named(v, names, t, trees, depth - 1)) is not None), None)
