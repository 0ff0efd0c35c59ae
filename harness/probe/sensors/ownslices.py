"""Gathers with a backward of the script's own that hands on the rank's own part of the gradient, and nothing of what other ranks' losses have for it.

Looked at in the first steps, where something that has a graph was gathered: the nodes of such functions are asked, right before and behind their backward,
whether what they give back is the own part of what they were given.
Event "own_slice" (once a function): site (the last line of its backward), function, parts (ranks), numel (of the own part), scaled (the source multiplies
something by the number of ranks: it may be this).
"""

from __future__ import annotations

import ast
from typing import Any

from .. import cuts, reaching, sites, syntax, worldsizes
from ..patching import contained, quiet
from ..state import S
from . import backward

NUM_STEPS, MAX_NODES = 3, 300
MULTIPLY = {"mul", "mul_", "multiply", "_foreach_mul_", "scale"}
_told: set[str] = set()


@contained
def _look(loss: Any) -> None:
    if S.since.joined and loss.grad_fn is not None and S.group is not None:
        for node in _functions(loss.grad_fn):
            _watch(node, S.group.rank(), S.group.size())


def _functions(root: Any) -> list[Any]:
    """Nodes of the graph that a function of the user's made."""
    found, todo, seen = [], [root], {root}
    while todo and len(seen) < MAX_NODES:
        node = todo.pop(0)
        code = getattr(getattr(getattr(type(node), "_forward_cls", None), "backward", None), "__code__", None)
        if code is not None and sites.is_user_code(code):
            found.append(node)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)
    return found


def _watch(node: Any, rank: int, size: int) -> None:
    """The own part is copied before the backward: the script may reduce what it is given where it lies."""
    made_by = type(node)._forward_cls
    own: list[Any] = []

    def enter(given: Any) -> None:
        share = _share(given, rank, size)
        own[:] = [] if share is None else [share.clone()]

    def leave(result: Any, given: Any) -> None:
        told = [t for t in result if t is not None]
        if own and len(told) == 1 and made_by.__qualname__ not in _told and _is_same(told[0], own[0]):
            _told.add(made_by.__qualname__)
            code = made_by.backward.__code__
            site = (code.co_filename, max(line for *_, line in code.co_lines() if line), code.co_name)
            S.recorder.event("own_slice", site, function=made_by.__name__, parts=size, numel=int(own[0].numel()), scaled=_is_scaled())
        own.clear()

    node.register_prehook(quiet(enter))
    node.register_hook(quiet(leave))


def _share(given: Any, rank: int, size: int) -> Any:
    """This rank's part of the gradient of what was gathered: of one tensor, or one of as many."""
    told = [t.detach() for t in given if t is not None]
    if len(told) == size > 1 and len({t.shape for t in told}) == 1:
        return told[rank].reshape(-1)
    if len(told) != 1 or told[0].numel() % size:
        return None
    return told[0].reshape(-1).chunk(size)[rank]


def _is_same(result: Any, own: Any) -> bool:
    import torch

    return result.numel() == own.numel() and bool(own.any()) and torch.equal(result.detach().reshape(-1), own)


def _is_scaled() -> bool:
    """In doubt yes."""
    files = cuts.user_files()
    trees: reaching.Trees = tuple((f, t) for f in files if (t := syntax.tree(f)) is not None)
    return not 0 < len(trees) == len(files) <= cuts.MAX_FILES or any(_multiplies(n, t, trees) for _, t in trees for n in syntax.nodes(t))


def _multiplies(node: ast.AST, tree: ast.Module, trees: reaching.Trees) -> bool:
    factors: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = [node.left, node.right]
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
        factors = [node.value]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MULTIPLY:
        factors = [*node.args]
    repeats = any(isinstance(f, (ast.List, ast.Tuple)) for f in factors)
    return not repeats and any(worldsizes.is_world(f, tree, trees) for f in factors)


def arm() -> None:
    backward.at_backward.append(_look, NUM_STEPS)
