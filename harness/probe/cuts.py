"""What the script's source holds: whether it may cut or thin out what it gathers from all ranks (in doubt yes), whether it has a text."""

from __future__ import annotations

import ast
import linecache
import os
import sys

from . import origins, sites

THINNING = {
    "dedup", "deduplicate", "dict", "drop_duplicates", "islice", "narrow", "remove_duplicates", "set", "trim", "truncate", "unique",
}  # fmt: skip
MAX_FILES = 20


def any_cut() -> bool:
    """Over all files of the user's that are loaded: a slice up to a computed bound, a dict or set comprehension, a stored item under a
    computed key, a function that thins out."""
    files = {
        name
        for m in list(sys.modules.values())
        if isinstance(name := getattr(m, "__file__", None), str) and os.path.isabs(name) and sites.is_user_file(name)
    }
    if not files or len(files) > MAX_FILES:
        return True
    trees = [origins._tree(name) for name in sorted(files)]
    return any(tree is None or any(_cuts(node) for node in ast.walk(tree)) for tree in trees)


def any_text(text: str) -> bool:
    """Whether one of those files holds this text; False where there are too many of them."""
    files = _files()
    return len(files) <= MAX_FILES and any(text in line for name in files for line in linecache.getlines(name))


def _files() -> list[str]:
    """Of the user's modules that are loaded."""
    names = (getattr(m, "__file__", None) for m in list(sys.modules.values()))
    return sorted({n for n in names if isinstance(n, str) and os.path.isabs(n) and sites.is_user_file(n)})


def _cuts(node: ast.AST) -> bool:
    if isinstance(node, (ast.DictComp, ast.SetComp)):
        return True
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name in THINNING or "unique" in name or "dedup" in name
    if not isinstance(node, ast.Subscript):
        return False
    if isinstance(node.ctx, ast.Store):
        return not isinstance(node.slice, (ast.Constant, ast.Slice))
    one = node.slice
    return isinstance(one, ast.Slice) and one.upper is not None and not _constant(one.upper) and (one.lower is None or _constant(one.lower))


def _constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))
