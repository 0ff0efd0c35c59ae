"""Looks a statement up in the user's source where no call can be hooked, e.g. `p.requires_grad = True`. Read in the rank, parsed once."""

from __future__ import annotations

import ast
from functools import cache

from .sites import Site


@cache
def _tree(file: str) -> ast.Module | None:
    try:
        with open(file, encoding="utf-8") as f:
            return ast.parse(f.read(2_000_000))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def assignments(file: str, attribute: str) -> list[Site]:
    """Statements in `file` that assign to `<anything>.<attribute>`, in order."""
    tree = _tree(file)
    found: list[Site] = []
    for node in ast.walk(tree) if tree is not None else ():
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []
        )
        if any(isinstance(t, ast.Attribute) and t.attr == attribute for t in targets):
            found.append((file, node.lineno, ""))  # type: ignore[attr-defined]
    return sorted(found, key=lambda s: s[1])
