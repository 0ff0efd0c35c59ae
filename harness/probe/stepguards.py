"""What decides, in the source of a loop that accumulates, whether an optimizer steps: the `if` around the step, or what its flag was set to."""

from __future__ import annotations

import ast

from . import sources, syntax
from .sites import Site


def decided_at(file: str) -> tuple[Site, ...]:
    """Of each step under an `if`: the assignment of the one name that the `if` asks, where there is one in the function before it; else the `if`."""
    tree = syntax.tree(file)
    return tuple((file, _flag_line(tree, line), name) for file, line, name in sources.guarded_steps(file)) if tree is not None else ()


def _flag_line(tree: ast.Module, line: int) -> int:
    scope = syntax.function_at(tree, line)
    asked = next((n.test for n in syntax.nodes(scope) if isinstance(n, ast.If) and n.lineno == line), None)
    if not isinstance(asked, ast.Name):
        return line
    set_at = [
        n.lineno
        for n in syntax.own_nodes(scope)
        if isinstance(n, ast.Assign) and n.lineno < line and any(isinstance(t, ast.Name) and t.id == asked.id for t in n.targets)
    ]
    return max(set_at, default=line)
