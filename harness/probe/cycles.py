"""Whether the script may make learning rates that come again and again, as its source shows: `0.5 * (1 + cos(pi * (step % period) / period))`."""

from __future__ import annotations

import ast
import re
from functools import cache

from . import cuts, syntax

RATE = re.compile(r"(?<![a-z])lr(?![a-z])|rate|sched|cosine|anneal|warm", re.IGNORECASE)


def of_rates() -> bool:
    """In any file of the user's; in doubt yes."""
    files = cuts.user_files()
    return len(files) > cuts.MAX_FILES or any(in_file(name) for name in files)


@cache
def in_file(file: str) -> bool:
    """A remainder that is computed with, not compared (`if step % 100 == 0`), where a rate is made."""
    tree = syntax.tree(file)
    if tree is None:
        return False
    makers = [n for n in syntax.nodes(tree) if _makes_a_rate(n)]
    return any(_has_remainder(node) for node in makers)


def _makes_a_rate(node: ast.AST) -> bool:
    """A function that is called so, or a statement that gives a rate its value."""
    if isinstance(node, syntax.FUNCTIONS):
        return bool(RATE.search(node.name))
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(RATE.search(ast.unparse(t)) for t in targets)
    if isinstance(node, ast.Call):
        return any(isinstance(a, ast.Lambda) for a in (*node.args, *(k.value for k in node.keywords))) and bool(RATE.search(ast.unparse(node.func)))
    return False


def _has_remainder(scope: ast.AST) -> bool:
    found = {id(n) for n in ast.walk(scope) if _is_remainder(n)}
    compared = {id(part) for n in ast.walk(scope) if isinstance(n, ast.Compare) for part in (n.left, *n.comparators)}
    return bool(found - compared)


def _is_remainder(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return not isinstance(node.left, (ast.Constant, ast.JoinedStr))  # "%d" % step
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("fmod", "divmod", "remainder")
