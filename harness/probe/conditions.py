"""What decides whether a statement is reached, and how often: the branches around it, the ways out before it, the loop that it stands in.

Read from the source, once a call site (0.1-5 ms), so that a statement that only some ranks came to can be traced to the line that decided it.
"""

from __future__ import annotations

import ast
from typing import Any

from . import sites, syntax

MAX_FRAMES = 4
Branch = ast.If | ast.Try | ast.Match
WAYS_OUT = (ast.Return, ast.Continue, ast.Break)


def before(stack: list[sites.Site]) -> dict[str, Any]:
    """`ways`: [{site, kind "branch" | "exit"}], innermost first, over the frames of a call; `loop`: the header of the loop around the call
    itself. Empty where a file has no source."""
    ways: list[dict[str, Any]] = []
    for file, line, function in stack[:MAX_FRAMES]:
        tree = syntax.tree(file)
        if tree is None:
            return {"ways": [], "loop": None}
        scope = syntax.function_at(tree, line)
        ways.extend({"site": sites.as_json((file, at, function)), "kind": kind} for at, kind in _ways(scope, line))
    return {"ways": ways[:20], "loop": _loop(stack[0]) if stack else None}


def _loop(site: sites.Site) -> dict[str, Any] | None:
    tree = syntax.tree(site[0])
    around = [
        n
        for n in (syntax.own_nodes(syntax.function_at(tree, site[1])) if tree is not None else ())
        if isinstance(n, (ast.For, ast.While)) and n.lineno < site[1] <= (n.end_lineno or n.lineno)
    ]
    return sites.as_json((site[0], max(n.lineno for n in around), site[2])) if around else None


def _ways(scope: syntax.Function, line: int) -> list[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    for node in syntax.own_nodes(scope):
        if isinstance(node, ast.If) and not _is_main(node):
            if any(syntax.spans(n, line) for n in (*node.body, *node.orelse)):
                found.add((node.lineno, "branch"))
            elif any(_leaves(n, scope, line) for n in (*node.body, *node.orelse)) and node.lineno < line:
                found.add((node.lineno, "exit"))
        elif isinstance(node, ast.ExceptHandler) and (node.lineno < line or _spans(node.body, line)):
            if _spans(node.body, line):
                found.add((node.lineno, "branch"))
            elif any(_leaves(n, scope, line) for n in node.body):
                found.add((node.lineno, "exit"))
    return sorted(found, reverse=True)


def _spans(body: list[ast.stmt], line: int) -> bool:
    return any(syntax.spans(n, line) for n in body)


def _leaves(statement: ast.stmt, scope: syntax.Function, line: int) -> bool:
    """Whether a statement of a branch, not of a branch inside it, goes past `line`: a return, or the end of (a turn of) a loop that holds it."""
    if isinstance(statement, ast.Return):
        return True
    if not isinstance(statement, WAYS_OUT):
        return False
    loops = [n for n in syntax.own_nodes(scope) if isinstance(n, (ast.For, ast.While)) and syntax.spans(n, statement.lineno)]
    return bool(loops) and syntax.spans(max(loops, key=lambda n: n.lineno), line)


def _is_main(node: ast.If) -> bool:
    return "__name__" in ast.unparse(node.test)
