"""A rank read from the environment, which is text, and compared with a number: `os.environ["RANK"] == 0` is never true.

Event "rank_text" (at the end, first 4): site (of the comparison), name (as the source has it), variable, value. The user's files that
speak of the environment are read as syntax, once.
"""

from __future__ import annotations

import ast
import linecache
import os

from .. import cuts, syntax
from ..arm import at_close
from ..patching import quiet
from ..state import S

VARIABLES = frozenset(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"))

MAX_TOLD = 4


def _variable(node: ast.AST) -> str | None:
    """Which variable `os.environ["RANK"]`, `os.environ.get("RANK", 0)` or `os.getenv("RANK")` reads."""
    if isinstance(node, ast.Subscript):
        owner, key = node.value, node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args and node.func.attr in ("get", "getenv"):
        owner, key = (node.func.value if node.func.attr == "get" else node.func), node.args[0]
    else:
        return None
    read = (isinstance(owner, ast.Attribute) and owner.attr in ("environ", "getenv")) or (isinstance(owner, ast.Name) and owner.id == "environ")
    return key.value if read and isinstance(key, ast.Constant) and key.value in VARIABLES else None


def comparisons(tree: ast.Module) -> list[tuple[int, str, str]]:
    """(line, name, variable) of what is text for certain and compared with an integer."""
    held: dict[str, set[str | None]] = {}
    for node in syntax.nodes(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For)) else []
        for target in (t for t in targets if isinstance(t, ast.Name)):
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            held.setdefault(target.id, set()).add(_variable(value) if value is not None else None)
        if isinstance(node, ast.arg):
            held.setdefault(node.arg, set()).add(None)
    found = []
    for node in syntax.nodes(tree):
        if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            continue
        if not isinstance(node.comparators[0], ast.Constant) or type(node.comparators[0].value) is not int:
            continue
        known = held.get(node.left.id, set()) if isinstance(node.left, ast.Name) else {_variable(node.left)}
        if len(known) == 1 and (variable := next(iter(known))) is not None:
            found.append((node.lineno, ast.unparse(node.left), variable))
    return found


@quiet
def _tell() -> None:
    told = 0
    for file in cuts.user_files()[: cuts.MAX_FILES]:
        tree = syntax.tree(file) if any("environ" in line or "getenv" in line for line in linecache.getlines(file)) else None
        for line, name, variable in comparisons(tree) if tree is not None else ():
            if variable in os.environ and told < MAX_TOLD:
                told += 1
                S.recorder.event("rank_text", (file, line, ""), name=name, variable=variable, value=os.environ[variable][:20])


def arm() -> None:
    at_close.append(_tell)
