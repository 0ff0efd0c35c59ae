"""Where in the user's source a thing was made, and how a loop can be left. Read in the rank, from source that is on its disk anyway.

A finding must point at the statement to be edited: that is rarely the loop in which the harm shows, but the line that made the sampler,
or the `if` that leaves the loop. Both are looked up once a call site (0.1-5 ms), never in a step.
"""

from __future__ import annotations

import ast
import linecache
import re
from types import FrameType
from typing import Any

from . import sites

MAX_SOURCE_LINES = 20_000
_trees: dict[str, ast.Module | None] = {}


def argument(frame: FrameType | None, keyword: str, position: int, callee: str = "DataLoader") -> sites.Site | None:
    """The line that made the value of an argument of the call that `frame` is in: its assignment, or the argument itself where it is
    written out.

    Read from the source, not from the frame's variables: looking at those would keep them alive, and None where the source does not tell.
    """
    frame = sites.user_frame(frame)
    tree = _tree(frame.f_code.co_filename) if frame is not None else None
    if frame is None or tree is None:
        return None
    line, scope = frame.f_lineno, _scope(tree, frame.f_lineno)
    calls = [
        n
        for n in ast.walk(scope)
        if isinstance(n, ast.Call) and n.lineno <= line <= (n.end_lineno or n.lineno) and _callee(n).endswith(callee)
    ]
    if not calls:
        return None
    call = max(calls, key=lambda n: n.lineno)
    given = next((k.value for k in call.keywords if k.arg == keyword), None)
    if given is None and 0 <= position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args):
        given = call.args[position]
    if given is None:
        return None
    at = _assigned(scope, given, line) or (_assigned(tree, given, line) if isinstance(given, ast.Name) else 0)
    if not at and not isinstance(given, (ast.Name, ast.Attribute)):
        at = given.lineno
    return (frame.f_code.co_filename, at, frame.f_code.co_name) if at else None


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _assigned(scope: ast.AST, wanted: ast.expr, before: int) -> int:
    """The last line of this scope, up to `before`, that assigns to the same name or attribute; 0: none."""
    if not isinstance(wanted, (ast.Name, ast.Attribute)):
        return 0
    text, lines = ast.unparse(wanted), [0]
    for node in _same_scope(scope):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) else []
        )
        flat = [e for t in targets for e in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
        if node.__dict__.get("lineno", before + 1) <= before and any(isinstance(t, type(wanted)) and ast.unparse(t) == text for t in flat):
            lines.append(node.lineno)  # type: ignore[attr-defined]
    return max(lines)


def _scope(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function at `line`, or the module."""
    scope: ast.AST = tree
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        if scope is tree or node.lineno >= scope.lineno:  # type: ignore[attr-defined]
            scope = node
    return scope


def attribute_line(kind: type, attribute: str) -> sites.Site | None:
    """The line in a class of the user's that assigns `self.<attribute>` first."""
    for base in kind.__mro__:
        code = getattr(vars(base).get("__init__"), "__code__", None)
        if code is None or not sites.is_user_code(code):
            continue
        for line in range(code.co_firstlineno, code.co_firstlineno + 200):
            text = linecache.getline(code.co_filename, line)
            if re.search(rf"\bself\.{re.escape(attribute)}\b(\s*:[^=]+)?\s*(,[^=]*)?=[^=]", text):
                return (code.co_filename, line, code.co_name)
    return None


def method_line(kind: type, method: str) -> sites.Site | None:
    """Where a class of the user's defines a method."""
    for base in kind.__mro__:
        code = getattr(vars(base).get(method), "__code__", None)
        if code is not None:
            return (code.co_filename, code.co_firstlineno, code.co_name) if sites.is_user_code(code) else None
    return None


def _tree(name: str) -> ast.Module | None:
    if name not in _trees:
        lines = linecache.getlines(name)
        try:
            _trees[name] = ast.parse("".join(lines)) if 0 < len(lines) <= MAX_SOURCE_LINES else None
        except (SyntaxError, ValueError, RecursionError):
            _trees[name] = None
    return _trees[name]


def loops(frames: list[sites.Site]) -> dict[str, Any]:
    """The loops around these frames, innermost first: `ranges` of lines, and `exits`, the statements that can end them (`continue`s are
    listed too).

    Level 0 is the loop that the first frame's line belongs to (its header or its body), 1 the loop around it, and so on outwards.
    """
    ranges: list[dict[str, Any]] = []
    exits: list[dict[str, Any]] = []
    for file, line, function in frames:
        tree = _tree(file)
        if tree is None:
            break
        for loop in _loops_around(tree, line):
            level = len(ranges)
            ranges.append({"file": file, "func": function, "first": loop.lineno, "last": loop.end_lineno or loop.lineno, "level": level})
            exits.extend({"site": sites.as_json((file, at, function)), "level": level, "kind": kind} for at, kind in _ways_out(loop))
        if len(ranges) > 4:
            break
    return {"exits": exits[:40], "ranges": ranges}


def _loops_around(tree: ast.Module, line: int) -> list[ast.For | ast.While]:
    """Loops of the innermost function at `line` that contain it, innermost first."""
    scope = _scope(tree, line)
    loops = [n for n in _same_scope(scope) if isinstance(n, (ast.For, ast.While)) and n.lineno <= line <= (n.end_lineno or n.lineno)]
    return sorted(loops, key=lambda n: -n.lineno)


def _same_scope(scope: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        found.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            todo.extend(ast.iter_child_nodes(node))
    return found


def _ways_out(loop: ast.For | ast.While) -> list[tuple[int, str]]:
    """(line, kind) of the conditions that end this loop or a turn of it: its own `break`s and `continue`s, `return`s, a while's
    condition."""
    found: list[tuple[int, str]] = []
    if isinstance(loop, ast.While) and not (isinstance(loop.test, ast.Constant) and loop.test.value):
        found.append((loop.lineno, "while"))
    todo: list[tuple[ast.AST, int, bool]] = [(n, 0, True) for n in loop.body]
    while todo:
        node, condition, own = todo.pop(0)
        if isinstance(node, (ast.Break, ast.Continue)) and own:
            found.append((condition or node.lineno, type(node).__name__.lower()))
        elif isinstance(node, ast.Return):
            found.append((condition or node.lineno, "return"))
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = node.lineno if isinstance(node, ast.If) else condition
            still = own and not isinstance(node, (ast.For, ast.While))
            todo.extend((child, inner, still) for child in ast.iter_child_nodes(node))
    return sorted(set(found))
