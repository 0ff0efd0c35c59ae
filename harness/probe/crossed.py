"""A loss in which predictions of shape (N, 1) met targets of shape (N), or the other way round: N x N differences, of every sample with every other.

Read from the graph before its backward, and from the shapes that the loader gave: a difference whose one operand is the output of a linear layer,
with nothing but elementwise operations between, and whose other operand carries no gradient.
"""

from __future__ import annotations

import ast
import math
from typing import Any

from . import cuts, roots, sites, syntax, valuesources

MAX_NODES, MAX_CHAIN, MAX_DRAWS = 96, 12, 200
LOSSES = ("MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0")  # these expand what they are given
ELEMENTWISE = (
    "Sigmoid",
    "Softplus",
    "Tanh",
    "Relu",
    "LeakyRelu",
    "Exp",
    "Mul",
    "Div",
    "Add",
    "Clamp",
    "Neg",
    "Squeeze",
    "ToCopy",
    "_DDPSink",
)
# what makes an axis, or a matrix of all pairs: wherever one of these stands beside the loss, the N x N may be meant
SHAPING = {"unsqueeze", "expand", "expand_as", "view", "view_as", "reshape", "T", "mT", "t", "transpose", "permute", "outer", "cdist", "newaxis", "eye",
           "meshgrid", "einsum", "broadcast_to", "broadcast_tensors", "repeat", "tile", "stack", "cat", "matmul", "mm", "kron", "combinations", "vmap",
           "rearrange", "swapaxes", "movedim", "atleast_2d", "column_stack", "repeat_interleave", "outer_product", "cartesian_prod"}  # fmt: skip
# what compares the numbers of a row, or tells rows from columns: all pairs are meant, as in a contrastive loss
APART = {"LogSoftmax", "Softmax", "Logsumexp", "NllLoss", "Max", "Min", "Amax", "Amin", "Diagonal", "Triu", "Tril", "Gather", "Index", "Sort", "Topk",
         "Cumsum", "Median", "Kthvalue", "Std", "Var", "LinalgVectorNorm", "Norm"}  # fmt: skip
LINEAR = {"Sum", "Mean", "Add", "Sub", "Mul", "Div", "Neg", "View", "Squeeze", "ToCopy"}  # of the rows' sums: as good as one sum of all
Shape = tuple[int, ...]
_drawn: list[Any] = [0, []]  # batches so far, (shape, whether floating point) of the tensors of the last


def drew(tensors: list[Any]) -> None:
    _drawn[0] += 1
    _drawn[1] = [(tuple(t.shape), t.is_floating_point()) for t in tensors[:16]] if _drawn[0] <= MAX_DRAWS else []


def found(root: Any, shapes: list[tuple[Shape, bool]] | None = None) -> tuple[Shape, Shape] | None:
    """(shape of the predictions, of the targets) where the last batch's were crossed."""
    shapes = _drawn[1] if shapes is None else shapes
    rows = shapes[0][0][0] if shapes and shapes[0][0] else 0
    if rows < 2 or any(rows in shape[1:] for shape, _ in shapes):
        return None  # an N x N of the batch's own
    todo, seen = [(root, "")], {root}
    while todo and len(seen) < MAX_NODES:
        node, above = todo.pop(0)
        name = type(node).__name__
        if (name == "SubBackward0" or (name == "ExpandBackward0" and above in LOSSES)) and roots.shape_of(node) == (rows, rows):
            predicted = _predicted(node, rows)
            target = (rows,) if predicted == (rows, 1) else (rows, 1)
            if predicted and (target, True) in shapes and (predicted, True) not in shapes:
                return predicted, target
        for below, _ in () if _apart(node, rows) else node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append((below, name))
    return None


def _apart(node: Any, rows: int) -> bool:
    """Whether a node on the way from the loss tells the rows of a matrix from its columns."""
    kind, shape = type(node).__name__.split("Backward")[0], roots.shape_of(node)
    partial = math.prod(shape) > 1 and shape != (rows, rows)
    return kind in APART or (partial and kind not in LINEAR)


def _predicted(node: Any, rows: int) -> Shape:
    """The shape of the one operand with a gradient, if a linear layer of one output made it and nothing of it depends on as many numbers as rows."""
    operands = [n for n, _ in node.next_functions if n is not None]
    given = roots.shape_of(operands[0]) if len(operands) == 1 else ()
    one = operands[0] if given in ((rows, 1), (rows,)) else None
    for _ in range(MAX_CHAIN):
        if one is None or roots.shape_of(one) not in ((rows, 1), (rows,)):
            return ()
        name = type(one).__name__
        if name == "AddmmBackward0":
            return given if roots.shape_of(one) == (rows, 1) else ()
        following = [n for n, _ in one.next_functions if n is not None]
        one = following[0] if len(following) == 1 and name.split("Backward")[0] in ELEMENTWISE else None
    return ()


def unmeant(stack: list[sites.Site]) -> sites.Site | None:
    """The difference in the source where nothing beside it makes an axis: none of the functions that stand around the backward, nor of those that
    they call. UNKNOWN where it is not one statement; None where the N x N may be meant."""
    files = cuts.user_files()
    trees = {file: t for file in files[: cuts.MAX_FILES] if (t := syntax.tree(file)) is not None}
    if len(files) > cuts.MAX_FILES or not stack or any(at[0] not in trees for at in stack):
        return None
    todo: list[tuple[str, syntax.Function]] = [(at[0], syntax.function_at(trees[at[0]], at[1])) for at in stack]
    done: set[int] = set()
    places: set[sites.Site] = set()
    while todo:
        file, scope = todo.pop()
        if id(scope) in done:
            continue
        done.add(id(scope))
        nodes = syntax.own_nodes(scope)
        if any(_shapes(n) for n in nodes):
            return None
        places |= {(file, n.lineno, getattr(scope, "name", "")) for n in nodes if isinstance(n, ast.BinOp) and _difference(n)}
        called = {valuesources.callee(n) for n in nodes if isinstance(n, ast.Call)}
        todo += [(f, one) for f, t in trees.items() for one in _reached(t, called)]
    return places.pop() if len(places) == 1 else sites.UNKNOWN


def _reached(tree: ast.Module, called: set[str]) -> list[syntax.Function]:
    """Functions of these names, and the methods with a difference of classes of these names."""
    own: list[syntax.Function] = []
    for one in syntax.functions(tree):
        owner = valuesources.owner_of(tree, one.lineno)
        if one.name in called or (owner is not None and _loss_method(one, owner, called)):
            own.append(one)
    return own


def _loss_method(method: ast.FunctionDef | ast.AsyncFunctionDef, owner: ast.ClassDef, called: set[str]) -> bool:
    if "Loss" in "".join((owner.name, *map(ast.unparse, owner.bases))):
        return True
    plain = method.name == "__call__" or not method.name.startswith("__")
    return plain and owner.name in called and any(_difference(n) for n in syntax.own_nodes(method))


def _shapes(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return any(isinstance(p, ast.Constant) and p.value is None for p in parts)
    name = (
        node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else ""
    )
    return name in SHAPING or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult))


def _difference(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and not any(isinstance(n, ast.Constant) for n in (node.left, node.right))
    )
