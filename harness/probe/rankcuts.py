"""Whether a value is made of a part that the rank cuts out for itself, `rows[rank * n : (rank + 1) * n]`, or of one that is its own by design,
`sites[rank]`, as the source shows it."""

from __future__ import annotations

import ast
import re

from . import reaching, syntax, valuesources, worldsizes
from .reaching import Placed, Trees

RANK = re.compile(r"(?<![a-z])rank(?![a-z])")
SPLITS = {"chunk", "split", "array_split", "tensor_split"}
NUMBERED = {"arange", "range", "islice", "shard"}
SAMPLERS = {"DistributedSampler", "split_by_node", "split_dataset_by_node"}
MAX_DEPTH = 4
LOOPS = (ast.For, ast.AsyncFor, ast.While)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def is_cut(behind: list[Placed], trees: Trees) -> bool:
    """Some part is cut out by the rank, and none is picked by it: a site, a client, a file of its own may have a scale of its own."""
    return any(_cuts(n, t, trees) for n, t in behind) and not any(_picks(n, t, trees) for n, t in behind)


def _cuts(node: ast.AST, tree: ast.Module, trees: Trees) -> bool:
    if isinstance(node, ast.Subscript):
        index = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
        if isinstance(index, ast.Slice):
            return any(by_rank(bound, tree, trees) for bound in (index.lower, index.upper) if bound is not None)
        return _is_split(node.value, tree, trees) and by_rank(index, tree, trees)
    if isinstance(node, ast.Call):
        name = valuesources.callee(node)
        return name in SAMPLERS or (name in NUMBERED and any(by_rank(a, tree, trees) for a in (*node.args, *(k.value for k in node.keywords))))
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Mod):
        return by_rank(node.comparators[0], tree, trees)
    return False


def _picks(node: ast.AST, tree: ast.Module, trees: Trees) -> bool:
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, (ast.Slice, ast.Tuple, ast.Constant)):
        return by_rank(node.slice, tree, trees) and not _is_split(node.value, tree, trees)
    if isinstance(node, ast.JoinedStr):
        return any(isinstance(v, ast.FormattedValue) and by_rank(v.value, tree, trees) for v in node.values)
    if isinstance(node, ast.Call) and valuesources.callee(node) in ("str", "format"):
        return any(by_rank(a, tree, trees) for a in (*node.args, *(k.value for k in node.keywords)))
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)


def _is_split(value: ast.expr, tree: ast.Module, trees: Trees) -> bool:
    """Into parts whose number or size hangs on the number of ranks; `torch.split(recording, session_lengths)` has parts of its own."""
    if isinstance(value, ast.Name):
        return any(isinstance(v, ast.expr) and not isinstance(v, ast.Name) and _is_split(v, t, trees) for v, t in reaching.of_name(value, tree, trees))
    if not isinstance(value, ast.Call) or valuesources.callee(value) not in SPLITS:
        return False
    parts = (n for given in (*value.args, *(k.value for k in value.keywords)) for n in reaching.into(given, tree, trees))
    return any(worldsizes.is_world(n, t, trees) for n, t in parts)


def by_rank(bound: ast.AST, tree: ast.Module, trees: Trees, depth: int = MAX_DEPTH) -> bool:
    """Whether a number is made from the rank."""
    if isinstance(bound, ast.Call) and valuesources.callee(bound) == "len":
        return False
    if isinstance(bound, ast.Call) and valuesources.callee(bound) == "get_rank":
        return True
    if isinstance(bound, ast.Subscript) and ast.unparse(bound.value).endswith("environ"):
        return isinstance(bound.slice, ast.Constant) and bound.slice.value == "RANK"
    if isinstance(bound, (ast.Name, ast.Attribute)):
        name = bound.id if isinstance(bound, ast.Name) else bound.attr
        if RANK.search(name.lower()):
            return True
        more = reaching.of_name(bound, tree, trees) if isinstance(bound, ast.Name) else list(reaching.of_attribute(name, trees))
        return depth > 0 and any(by_rank(v, t, trees, depth - 1) for v, t in more)
    return any(by_rank(child, tree, trees, depth) for child in ast.iter_child_nodes(bound) if isinstance(child, ast.expr))


def runs_once(node: ast.expr, tree: ast.Module, trees: Trees, depth: int = 6) -> bool:
    """Whether an expression stands in no loop, and its function is called in none: what it makes is one thing for all that the rank has."""
    scope = syntax.function_at(tree, node.lineno)
    if in_loop(node, scope):
        return False
    if not isinstance(scope, syntax.FUNCTIONS):
        return True
    calls = reaching.callers(scope, tree, trees)
    if not calls:
        return _is_started(scope.name, trees)
    return depth > 0 and all(runs_once(call, other, trees, depth - 1) for other, call in calls)


def in_loop(node: ast.expr, scope: ast.AST) -> bool:
    """Of its own function."""
    for around in syntax.own_nodes(scope):
        if isinstance(around, LOOPS) and any(syntax.spans(s, node.lineno) for s in around.body):
            return True
        if isinstance(around, COMPREHENSIONS) and any(inner is node for inner in syntax.nodes(around)):
            return True
    return False


def _is_started(name: str, trees: Trees) -> bool:
    """`mp.spawn(worker, ...)`, `Process(target=worker)`."""
    for _, tree in trees:
        for call in (n for n in syntax.nodes(tree) if isinstance(n, ast.Call) and valuesources.callee(n) in ("spawn", "Process", "start_processes")):
            if any(isinstance(a, ast.Name) and a.id == name for a in (*call.args, *(k.value for k in call.keywords))):
                return True
    return False
