"""Which parameters the script's source leaves out by name: `"head" not in name`, `not name.startswith("head.")`, `if "bn" in name: continue`.

Event "name_filters" (at the end, only where gradients are synchronised without DDP): excluded [text].
Parsing costs some ms, once.
"""

from __future__ import annotations

import ast

from .. import cuts, syntax
from ..arm import at_close
from ..patching import quiet
from ..state import S

MAX_FILES = 20


def excluded(tree: ast.AST) -> set[str]:
    """Texts of which a name that holds them, or begins with them, is left out."""
    found: set[str] = set()
    for node in syntax.nodes(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.NotIn):
            found |= _text(node.left)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found |= _asked(node.operand)
        elif isinstance(node, ast.If) and isinstance(node.body[0], ast.Continue):
            found |= _asked(node.test)
    return found


def _asked(test: ast.expr) -> set[str]:
    """`"head" in name`, `name.startswith("head")`, `any(k in name for k in ("head", "bn"))`."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.In):
        return _text(test.left)
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr == "startswith" and test.args:
        return _text(test.args[0])
    if isinstance(test, ast.Call) and getattr(test.func, "id", "") == "any" and test.args and isinstance(test.args[0], ast.GeneratorExp):
        return _text(test.args[0].generators[0].iter)
    return set()


def _text(node: ast.expr) -> set[str]:
    parts = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    return {p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str) and len(p.value) > 1}


def _tell() -> None:
    if S.ddps or not S.steps_by_optimizer or not S.collectives:
        return
    files = cuts.user_files()
    trees = [syntax.tree(name) for name in files[:MAX_FILES]]
    texts = sorted(set().union(*(excluded(t) for t in trees if t is not None))) if trees else []
    if texts:
        S.recorder.event("name_filters", excluded=texts[:40])


def arm() -> None:
    at_close.append(quiet(_tell))
