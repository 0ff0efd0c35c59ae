"""Which of the candidates that were gathered from all ranks a contrastive loss takes for the rank's own.

Looked at in the first steps, on ranks above 0: the loss's graph is asked for an operation that picks one column a row out of a matrix of
[rows of this rank, rows of all ranks] (cross entropy, a diagonal, an index), and the product below it for the candidates. These lie in the order
in which they were gathered where the block of this rank holds its own tensor and the first block does not.
Event "own_targets" (once): site (what makes the targets, where the source tells; else the loss), op (what picks), rows, columns, gathered (site).
"""

from __future__ import annotations

import ast
from typing import Any

from .. import sites, sources, syntax
from ..patching import contained
from ..state import S
from . import gathers

MAX_NODES = 300
MADE_BY = {"DiagonalBackward0": ("diag", "diagonal"), "": ("arange",)}  # the calls that make the targets


class Own:
    """A gather: what this rank gave."""

    def __init__(self, site: sites.Site, own: Any, rank: int, world_size: int) -> None:
        self.site, self.rank, self.world_size = site, rank, world_size
        self.rows, self.sums = int(own.shape[0]), gathers.sums([own])


_pending: list[Own] = []
_told: list[bool] = []


def note(site: sites.Site, own: Any, num: int) -> None:
    """Inside of a guarded look after a gather of the first steps: `num` tensors like this one came together."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    if not _told and rank > 0 and num == dist.get_world_size() and own.dim() == 2 and own.is_floating_point() and len(_pending) < gathers.MAX_PENDING:
        with torch.no_grad():
            _pending.append(Own(site, own, rank, num))


@contained
def _look(loss: Any) -> None:
    found = list(_pending)
    _pending.clear()
    if not found or _told or getattr(loss, "grad_fn", None) is None:
        return
    for node, op, shape in _picks(loss.grad_fn):
        for one in found:
            if shape == (one.rows, one.rows * one.world_size) and _lies_at_its_rank(node, one):
                made = _made_at(one.site, op) or (S.loss_site and (sources.loss_made_at(*S.loss_site[:2]) or S.loss_site))
                if made is None:
                    continue  # the next backward will know the last one's site
                _told.append(True)
                S.recorder.event("own_targets", made, op=op.removesuffix("0").removesuffix("Backward"), rows=shape[0],
                                 columns=shape[1], gathered=sites.as_json(one.site))  # fmt: skip
                return


def _below(root: Any) -> list[Any]:
    todo, seen, order = [root], {root}, []
    while todo and len(seen) < MAX_NODES:
        node = todo.pop(0)
        order.append(node)
        for next_, _ in node.next_functions:
            if next_ is not None and next_ not in seen:
                seen.add(next_)
                todo.append(next_)
    return order


def _picks(root: Any) -> list[tuple[Any, str, tuple[int, int]]]:
    """(node, its name, shape of the matrix) of what takes column i of row i, for every row."""
    found = []
    for node in _below(root):
        name = type(node).__name__
        shape, columns = _picked(node, name)
        if shape is not None and len(shape) == 2 and columns == list(range(shape[0])):
            found.append((node, name, (int(shape[0]), int(shape[1]))))
    return found


def _picked(node: Any, name: str) -> tuple[Any, list[int] | None]:
    try:
        if name == "NllLossBackward0":
            return node._saved_self.shape, _ints(node._saved_target)
        if name == "DiagonalBackward0" and not node._saved_offset:
            shape = node._saved_self_sym_sizes
            return shape, list(range(min(shape)))
        if name == "IndexBackward0" and len(node._saved_indices) == 2:
            rows, columns = node._saved_indices
            return node._saved_self_sym_sizes, _ints(columns) if _ints(rows) == list(range(len(rows))) else None
        if name == "GatherBackward0" and node._saved_dim in (1, -1, 2**64 - 1):
            return node._saved_self.shape, _ints(node._saved_index.reshape(-1))
    except (AttributeError, RuntimeError, TypeError):
        pass
    return None, None


def _ints(tensor: Any) -> list[int] | None:
    if tensor is None:
        return None
    return [int(v) for v in tensor.tolist()] if tensor.dim() == 1 and tensor.numel() <= 65_536 else None


def _lies_at_its_rank(node: Any, one: Own) -> bool:
    import torch

    with torch.no_grad():
        for below in _below(node):
            if type(below).__name__ in gathers.PRODUCTS:
                for factor in (f for f in (gathers.saved(below, name) for name in gathers.FACTORS) if f is not None):
                    blocks = _blocks(factor, one.rows, one.rows * one.world_size)
                    if blocks and gathers.close(gathers.sums([blocks[one.rank]]), one.sums) and not gathers.close(gathers.sums([blocks[0]]), one.sums):
                        return True
    return False


def _blocks(factor: Any, rows: int, columns: int) -> Any:
    """The candidates rank by rank; none where the factor does not hold them."""
    matrix = factor.detach().squeeze()
    if matrix.dim() != 2 or columns not in matrix.shape:
        return ()
    return matrix.split(rows, dim=0 if matrix.shape[0] == columns else 1)


def _made_at(site: sites.Site, op: str) -> sites.Site | None:
    """The one call in the function, the class or the file of the gather that makes such targets."""
    tree = syntax.tree(site[0])
    if tree is None:
        return None
    wanted = MADE_BY.get(op, MADE_BY[""])
    classes = [n for n in syntax.nodes(tree) if isinstance(n, ast.ClassDef) and syntax.spans(n, site[1])]
    for scope in (syntax.function_at(tree, site[1]), *classes[-1:], tree):
        calls = [n.lineno for n in syntax.nodes(scope) if isinstance(n, ast.Call) and _name(n.func) in wanted]
        if calls:
            return (site[0], calls[0], getattr(scope, "name", "")) if len(set(calls)) == 1 else None
    return None


def _name(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def arm() -> None:
    from . import backward

    backward.at_backward.append(_look, when=_pending)
