"""Whether the attribute that a frame is reading right now is read for its value, or only asked what it is: its shape, its device, whether there is one."""

from __future__ import annotations

import ast
from functools import cache
from itertools import islice
from types import CodeType
from typing import Any

from . import syntax

DESCRIPTIONS = frozenset(
    {"shape", "dtype", "device", "ndim", "is_cuda", "is_cpu", "is_meta", "layout", "requires_grad", "data_ptr", "size", "dim", "numel", "nelement",
     "element_size", "stride", "is_floating_point", "is_contiguous", "get_device", "type", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"}
)  # fmt: skip
LIKE = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "isinstance", "len", "type", "id", "hasattr"})


def is_value(frame: Any) -> bool:
    """False where the source does not tell."""
    return _is_value(frame.f_code, frame.f_lasti)


@cache
def _is_value(code: CodeType, instruction: int) -> bool:
    place = next(islice(code.co_positions(), instruction // 2, None), None)
    tree = syntax.tree(code.co_filename)
    if place is None or None in place or tree is None:
        return False
    line, end_line, column, end_column = place
    scope = syntax.function_at(tree, line or 0)
    nodes = syntax.nodes(scope)
    found = [n for n in nodes if isinstance(n, ast.Attribute) and (n.lineno, n.end_lineno, n.col_offset, n.end_col_offset) == (line, end_line, column, end_column)]
    return bool(found) and not any(_describes(parent, found[0]) for parent in nodes)


def _describes(parent: ast.AST, node: ast.Attribute) -> bool:
    """Whether this is the node's parent, and asks nothing of its elements."""
    if isinstance(parent, ast.Attribute):
        return parent.value is node and parent.attr in DESCRIPTIONS
    if isinstance(parent, ast.Compare):
        return node in (parent.left, *parent.comparators) and all(isinstance(o, (ast.Is, ast.IsNot)) for o in parent.ops)
    if isinstance(parent, ast.Call):
        name = parent.func.attr if isinstance(parent.func, ast.Attribute) else getattr(parent.func, "id", "")
        return node in parent.args and name in LIKE
    return False
