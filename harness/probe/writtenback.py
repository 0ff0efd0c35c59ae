"""Whether the script has a use for what a name holds: it reads it for anything but writing it back into weights, as
`for s, p in zip(self.stash, params): p.copy_(s)` does, or what writes it back is called somewhere, so that not to do so was decided."""

from __future__ import annotations

import ast
import linecache
from functools import cache
from typing import NamedTuple

from . import cuts, syntax
from .heldvalues import ATTRIBUTE, EVERYWHERE, Name

WRITES = frozenset({"copy_", "_foreach_copy_", "load_state_dict", "set_", "vector_to_parameters", "swap_tensors"})
CHANGES = frozenset({"append", "extend", "clear", "update", "setdefault", "add", "insert"})
ASKS = frozenset({"len", "bool", "isinstance", "hasattr", "type", "id", "zip", "list", "enumerate", "reversed", "items", "values", "keys", "detach", "clone",
                  "to", "cpu", "cuda", "get", "pop", "state_dict", "parameters", "named_parameters", "contiguous"})  # fmt: skip
MAX_ALIASES, MAX_FILES = 3, 200
NOTHING, WRITTEN_BACK, OTHER = range(3)  # what a read is for


class _Asked(NamedTuple):
    tree: ast.Module
    name: str
    attribute: bool
    running: bool  # a variable of a function that the script is in; else one of a function that may never be called
    depth: int = MAX_ALIASES


def has_use(name: Name) -> bool:
    """True where the source is not at hand."""
    trees = [tree for file in name.files if (tree := syntax.tree(file)) is not None]
    if not trees or len(cuts.user_files()) > MAX_FILES:
        return True
    if name.line == ATTRIBUTE:
        if any(_reflects(node) for tree in trees for node in syntax.nodes(tree)):
            return True  # read without being named
        return any(_is_used(_Asked(tree, name.name, True, False), tree) for tree in {*trees, *_with(name.name)})
    scope = trees[0] if name.line == EVERYWHERE else syntax.function_at(trees[0], name.line)
    return _is_used(_Asked(trees[0], name.name, False, True), scope)


def _reflects(node: ast.AST) -> bool:
    """Whether attributes are read by names that the source does not show: for a checkpoint, say."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("vars", "asdict", "getattr"):
        return node.func.id != "getattr" or not (len(node.args) > 1 and isinstance(node.args[1], ast.Constant))
    return isinstance(node, ast.Attribute) and node.attr in ("__dict__", "__getstate__", "asdict")


def _is_used(asked: _Asked, scope: ast.AST) -> bool:
    parents = _parents(scope)
    shadowed: set[ast.AST] = set()
    if not asked.attribute and scope is asked.tree:
        shadowed = {n for f in syntax.functions(asked.tree) if _binds(f, asked.name) for n in syntax.nodes(f)}
    for node in syntax.nodes(scope):
        if not _is_read(asked, node) or node in shadowed:
            continue
        use = _use(asked, node, parents)
        if use == OTHER or (use == WRITTEN_BACK and (asked.running or _is_called(asked.tree, node.lineno))):  # type: ignore[attr-defined]
            return True
    return False


def _is_read(asked: _Asked, node: ast.AST) -> bool:
    if asked.attribute:
        return isinstance(node, ast.Attribute) and node.attr == asked.name and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Name) and node.id == asked.name and isinstance(node.ctx, ast.Load)


def _with(word: str) -> list[ast.Module]:
    """The script's files that have a word."""
    files = [file for file in cuts.user_files()[:MAX_FILES] if any(word in line for line in linecache.getlines(file))]
    return [tree for file in files if (tree := syntax.tree(file)) is not None]


def _is_called(tree: ast.Module, line: int) -> bool:
    """Whether the function around a line is named anywhere outside of itself. One of Python's own names is called by Python."""
    function = syntax.function_at(tree, line)
    if not isinstance(function, syntax.FUNCTIONS) or function.name.startswith("__"):
        return True
    inside = set(syntax.nodes(function))
    return any(
        n not in inside and (n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", None)) == function.name
        for one in {tree, *_with(function.name)}
        for n in syntax.nodes(one)
        if isinstance(n, (ast.Attribute, ast.Name))
    )


@cache
def _parents(scope: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in syntax.nodes(scope) for child in ast.iter_child_nodes(node)}


def _binds(function: ast.AST, name: str) -> bool:
    return any(
        (isinstance(n, ast.arg) and n.arg == name) or (isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store))
        for n in syntax.nodes(function)
    )


def _use(asked: _Asked, node: ast.AST, parents: dict[ast.AST, ast.AST]) -> int:
    """Climbs from a read to its statement."""
    read, bare = node, True  # so far the thing itself, no part of it and nothing made of it
    while (parent := parents.get(node)) is not None:
        if isinstance(parent, ast.stmt) and not isinstance(parent, (ast.For, ast.AsyncFor)):
            return _ends_in(asked, parent, bare)
        if (use := _use_by(asked.tree, parent, node, read, parents)) is not None:
            return use
        if isinstance(parent, (ast.Compare, ast.UnaryOp, ast.BoolOp)) and _is_asked(parent, bare):
            return NOTHING
        bare = bare and isinstance(parent, (ast.Tuple, ast.NamedExpr))
        node = parent
    return NOTHING


def _use_by(tree: ast.Module, parent: ast.AST, node: ast.AST, read: ast.AST, parents: dict[ast.AST, ast.AST]) -> int | None:
    """What an expression, or a loop, does with a part of it; None where what comes out has to be followed."""
    if isinstance(parent, ast.Subscript) and parent.value is node and not isinstance(parent.ctx, ast.Load):
        return NOTHING
    if isinstance(parent, ast.IfExp) and parent.test is node:
        return NOTHING
    if isinstance(parent, (ast.Yield, ast.YieldFrom, ast.Await)):
        return OTHER
    if isinstance(parent, ast.Call):
        return _of_call(tree, parent, node)
    if isinstance(parent, (ast.For, ast.AsyncFor, ast.comprehension)):
        return _of_loop(parent, read, parents)
    return None


def _of_loop(loop: ast.For | ast.AsyncFor | ast.comprehension, read: ast.AST, parents: dict[ast.AST, ast.AST]) -> int | None:
    body: list[ast.AST] = [parents[loop]] if isinstance(loop, ast.comprehension) else list(loop.body)
    writes = [n for part in body for n in syntax.nodes(part) if _is_write(n)]
    if not writes:
        return None if isinstance(loop, ast.comprehension) else OTHER
    own = _variables(loop, read)
    to = [n.func.value if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) else getattr(n, "value", None) for n in writes]
    return NOTHING if all(isinstance(t, ast.Name) and t.id in own for t in to) else WRITTEN_BACK


def _variables(loop: ast.For | ast.AsyncFor | ast.comprehension, read: ast.AST) -> set[str]:
    """The loop's variables that stand for entries of what is read."""
    target: ast.AST = loop.target
    if isinstance(loop.iter, ast.Call) and isinstance(target, ast.Tuple) and getattr(loop.iter.func, "id", "") == "zip":
        at = [i for i, a in enumerate(loop.iter.args) if read in syntax.nodes(a)]
        target = target.elts[at[0]] if at and at[0] < len(target.elts) else target
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}


def _is_asked(parent: ast.AST, bare: bool) -> bool:
    """Whether it is there."""
    if isinstance(parent, ast.Compare):
        return all(isinstance(o, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for o in parent.ops)
    return bare and not (isinstance(parent, ast.UnaryOp) and not isinstance(parent.op, ast.Not))


def _of_call(tree: ast.Module, call: ast.Call, node: ast.AST) -> int | None:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
    if node is call.func:  # called on it
        return None if name in ASKS else NOTHING if name in CHANGES or name.endswith("_") else OTHER
    if name in WRITES:
        return NOTHING if name == "_foreach_copy_" and call.args and call.args[0] is node else WRITTEN_BACK
    if name in ASKS:
        return None
    own = [f for f in syntax.functions(tree) if f.name == name]
    return WRITTEN_BACK if own and all(any(_is_write(n) for n in syntax.nodes(f)) for f in own) else OTHER


def _is_write(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in WRITES
    return isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.ctx, ast.Store)


def _ends_in(asked: _Asked, statement: ast.stmt, bare: bool) -> int:
    if isinstance(statement, (ast.Expr, ast.Delete)) or (bare and isinstance(statement, (ast.Return, ast.If, ast.While, ast.Assert))):
        return NOTHING  # what is returned is held under another name, which is looked at as well
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if any(isinstance(t, ast.Attribute) and t.attr == "data" for t in targets):
            return WRITTEN_BACK
        return NOTHING if asked.depth and not any(_has_other_use(asked, t) for t in targets) else OTHER
    return OTHER


def _has_other_use(asked: _Asked, target: ast.expr) -> bool:
    """Of what it is assigned to."""
    if isinstance(target, ast.Name):
        scope = syntax.function_at(asked.tree, target.lineno)
        return _is_used(asked._replace(name=target.id, attribute=False, depth=asked.depth - 1), scope)
    if not isinstance(target, ast.Attribute):
        return True
    return _is_used(asked._replace(name=target.attr, attribute=True, running=False, depth=asked.depth - 1), asked.tree)
