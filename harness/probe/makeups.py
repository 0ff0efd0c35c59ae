"""What in the source may make up for a loss that is divided by the count of all ranks, where no value shows it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from . import sites, syntax
from .nonlinear import RANKS

ON_LEAVES = ("register_post_accumulate_grad_hook",)  # register_hook may be on an activation
HOOKS = ("register_hook", "register_full_backward_hook", "register_full_backward_pre_hook", "register_multi_grad_hook", "register_prehook")


@cache
def made_up(file: str, by_leaves: bool = True) -> bool:
    """A hook on gradients, or a learning rate that is made from the number of ranks. Not `by_leaves` where what hooks on parameters make of
    gradients is measured."""
    tree = syntax.tree(file)
    for node in syntax.nodes(tree) if tree is not None else ():
        if isinstance(node, ast.Attribute) and node.attr in (*HOOKS, *(ON_LEAVES if by_leaves else ())):
            return True
        if any(_is_rate(name) and RANKS.search(made) for name, made in _named(node)):
            return True
    return False


def _named(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(a name, what it is multiplied by or made from), both ways round for a product."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        pairs: list[tuple[ast.expr | str, ast.expr | None]] = [(node.left, node.right), (node.right, node.left)]
    elif isinstance(node, ast.keyword):
        pairs = [(node.arg or "", node.value)]
    elif isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.Dict):
        pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
    else:
        return
    for name, made in pairs:
        if made is not None:
            yield (name if isinstance(name, str) else ast.unparse(name)).lower(), ast.unparse(made).lower()


def _is_rate(text: str) -> bool:
    return "lr" in text or "learning_rate" in text


def predivided(frames: list[sites.Site]) -> bool:
    """Whether something is divided by the number of ranks before the sum, in the function that sums, or on the statement that calls it:
    then the sum is a mean. A helper that says so by its name is one too."""
    for depth, (file, line, function) in enumerate(frames[:3]):
        tree = syntax.tree(file)
        if tree is None or (depth == 0 and any(word in function.lower() for word in ("mean", "avg", "average"))):
            return True
        for node in syntax.own_nodes(syntax.function_at(tree, line)):
            if isinstance(node, (ast.expr, ast.stmt)) and (node.lineno <= line if depth == 0 else syntax.spans(node, line)) and _by_ranks(node):
                return True
    return False


def _by_ranks(node: ast.AST) -> bool:
    divided = syntax.division(node)
    return divided is not None and bool(RANKS.search(ast.unparse(divided[1]).lower()))
