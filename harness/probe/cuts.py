"""What the script's source holds: whether it may cut or thin out what it gathers from all ranks (in doubt yes), whether it has a text."""

from __future__ import annotations

import ast
import linecache
import os
import sys
from collections.abc import Sequence
from typing import Any

from . import sites, syntax

THINNING = {
    "dedup", "deduplicate", "dict", "drop_duplicates", "index_select", "islice", "masked_select", "narrow", "remove_duplicates", "set", "trim",
    "truncate", "unique", "unpad",
}  # fmt: skip
SPLITS = {"array_split", "split", "split_with_sizes", "tensor_split"}
GRIDS = ("mgrid", "ogrid")
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
MAX_FILES = 20
_known: tuple[int, str, list[Any], list[str]] = (0, "", [], [])  # how many modules were loaded, the last of them, the user's, and their files


def any_cut() -> bool:
    """Over all files of the user's that are loaded: a slice up to a computed bound, in any dimension, a mask below one, a split into computed sizes, a
    dict or set comprehension, a stored item under a computed key, a function that thins out."""
    files = user_files()
    if not files or len(files) > MAX_FILES:
        return True
    trees = [syntax.tree(name) for name in files]
    return any(tree is None or _any_in(_outside_models(tree)) for tree in trees)


def _outside_models(tree: ast.Module) -> list[ast.AST]:
    """All but the forwards of models, which cut positions and windows, as far as they gather nothing themselves."""
    forwards = [f for c in syntax.nodes(tree) if isinstance(c, ast.ClassDef) for f in c.body if isinstance(f, ast.FunctionDef) and f.name == "forward"]
    left_out = {id(n) for f in forwards if not any("gather" in getattr(n, "attr", getattr(n, "id", "")) for n in syntax.nodes(f)) for n in syntax.nodes(f)}
    return [n for n in syntax.nodes(tree) if id(n) not in left_out]


def _any_in(nodes: Sequence[ast.AST]) -> bool:
    masks = {t.id for n in nodes if isinstance(n, ast.Assign) and _below(n.value) for t in n.targets if isinstance(t, ast.Name)}
    return any(_cuts(n) or (isinstance(n, ast.Subscript) and getattr(n.slice, "id", "") in masks) for n in nodes)


def any_text(text: str) -> bool:
    """Whether one of those files holds this text; False where there are too many of them."""
    files = user_files()
    return len(files) <= MAX_FILES and any(text in line for name in files for line in linecache.getlines(name))


def user_modules() -> list[Any]:
    """Of the user's, loaded from files. Packages are judged by their top alone: to touch each of the 2,500 modules that torch brings would
    copy 6 MB of pages of a rank that was forked. Asked anew where another one is loaded: to go through their names takes 5 ms."""
    global _known
    loaded = list(sys.modules)
    if _known[:2] != (len(loaded), loaded[-1]):
        modules = _users(loaded)
        _known = (len(loaded), loaded[-1], modules, sorted({*_known[3], *(str(m.__file__) for m in modules)}))
    return _known[2]


def _users(loaded: list[str]) -> list[Any]:
    theirs = {top for top in {name.partition(".")[0] for name in loaded} if _may_be_users(sys.modules.get(top))}
    modules = [sys.modules.get(name) for name in loaded if name.partition(".")[0] in theirs]
    return [m for m in modules if isinstance(n := getattr(m, "__file__", None), str) and os.path.isabs(n) and sites.is_user_file(n)]


def user_files() -> list[str]:
    """Noted when the modules were: at the interpreter's end `__main__` has no `__file__` any more where runpy had run the script."""
    user_modules()
    return list(_known[3])


def _may_be_users(top: Any) -> bool:
    """A namespace package has no file: its modules are looked at."""
    file = getattr(top, "__file__", None)
    return not isinstance(file, str) or (os.path.isabs(file) and sites.is_user_file(file))


def _cuts(node: ast.AST) -> bool:
    if isinstance(node, (ast.DictComp, ast.SetComp)):
        return True
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name in THINNING or "unique" in name or "dedup" in name or (name in SPLITS and any(map(_sizes, node.args))) or (name == "zip" and _marks(node))
    if not isinstance(node, ast.Subscript):
        return False
    if isinstance(node.ctx, ast.Store):
        return not isinstance(node.slice, (ast.Constant, ast.Slice))
    if isinstance(node.slice, ast.Tuple):  # a grid of coordinates is made so, not cut
        return getattr(node.value, "attr", getattr(node.value, "id", "")) not in GRIDS and any(map(_up_to, node.slice.elts))
    return _up_to(node.slice) or _below(node.slice)


def _sizes(one: ast.expr) -> bool:
    """Of a split into parts of computed sizes: `split(rows, [n, len(rows) - n])`."""
    return isinstance(one, (ast.List, ast.Tuple)) and bool(one.elts) and not all(map(_constant, one.elts))


def _marks(call: ast.Call) -> bool:
    """`zip(predicted, data.labels)`, which ends with the shorter: predictions beside the labels of the whole set, which come from nowhere else."""
    texts = [ast.unparse(a).lower() for a in call.args]
    return any("pred" in t or "output" in t for t in texts) and any("label" in t or "target" in t or "answer" in t for t in texts)


def _up_to(one: ast.expr) -> bool:
    """A slice from the start to a computed bound."""
    return isinstance(one, ast.Slice) and one.upper is not None and not _constant(one.upper) and (one.lower is None or _constant(one.lower))


def _below(one: ast.expr) -> bool:
    """A mask of what lies below a computed bound: `rows[ids < len(data)]`."""
    return isinstance(one, ast.Compare) and isinstance(one.ops[0], ORDERED) and not _constant(one.left) and not _constant(one.comparators[0])


def _constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))
