"""Whether the attribute that a frame is reading right now is read for its value, or only asked what it is: its shape, its device, whether there is one."""

from __future__ import annotations

import ast
from functools import cache
from itertools import islice
from types import CodeType
from typing import Any

from . import nametests, syntax, variables

DESCRIPTIONS = frozenset(
    {"shape", "dtype", "device", "ndim", "is_cuda", "is_cpu", "is_meta", "layout", "requires_grad", "data_ptr", "size", "dim", "numel", "nelement",
     "element_size", "stride", "is_floating_point", "is_contiguous", "get_device", "type", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"}
)  # fmt: skip
LIKE = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "isinstance", "len", "type", "id", "hasattr"})


def is_value(frame: Any) -> bool:
    """False where the source does not tell."""
    found = _read(frame.f_code, frame.f_lasti)
    return found is not None and not (found[1] is not None and _is_nothing(found[1], frame))


def _is_nothing(bound: ast.expr, frame: Any) -> bool:
    """Of `bank[:filled]`: none of it has been filled so far."""
    held = frame.f_locals

    def find(name: str) -> Any:
        return held[name] if name in held else frame.f_globals[name]

    try:
        return type(value := nametests.evaluate(bound, find)) is int and value == 0
    except Exception:  # of the script's own values
        return False
    finally:
        variables.let_go(frame, held)


@cache
def _read(code: CodeType, instruction: int) -> tuple[ast.Attribute, ast.expr | None] | None:
    """The attribute that is read for its value, and the end of the part that is taken of it."""
    place = next(islice(code.co_positions(), instruction // 2, None), None)
    tree = syntax.tree(code.co_filename)
    if place is None or None in place or tree is None:
        return None
    line, end_line, column, end_column = place
    scope = syntax.function_at(tree, line or 0)
    nodes = syntax.nodes(scope)
    found = [n for n in nodes if isinstance(n, ast.Attribute) and (n.lineno, n.end_lineno, n.col_offset, n.end_col_offset) == (line, end_line, column, end_column)]
    if not found or any(_describes(parent, found[0]) for parent in nodes):
        return None
    parts = [n.slice for n in nodes if isinstance(n, ast.Subscript) and n.value is found[0] and isinstance(n.slice, ast.Slice)]
    return found[0], parts[0].upper if parts and parts[0].step is None else None


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
