"""Whether training counts on from a number of a checkpoint, as the source shows it: what is read from it decides where a loop begins or ends."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from . import sites, syntax

COUNT = re.compile(r"step|epoch|iter")


def counts_on(site: sites.Site) -> str:
    """The entry of the checkpoint, "" where none is seen: in the function at this line a count is read (`state["step"]`) into a name by which a
    loop of that function is bounded, into an attribute by which any loop of the file is, or returned to a caller that does so."""
    tree = syntax.tree(site[0]) if site[0] else None
    if tree is None:
        return ""
    scope = syntax.function_at(tree, site[1])
    for node in sorted((n for n in syntax.own_nodes(scope) if isinstance(n, (ast.Assign, ast.Return))), key=lambda n: n.lineno):
        entry = next((e for n in ast.walk(node.value) if (e := _entry(n))), "") if node.value is not None else ""
        if entry and any(_bounds_a_loop(target, where, tree) for target, where in _targets(tree, scope, node)):
            return entry
    return ""


def _targets(tree: ast.Module, scope: syntax.Function, node: ast.Assign | ast.Return) -> Iterator[tuple[ast.expr, ast.AST]]:
    """(what is given the count, the function that it happens in)."""
    if isinstance(node, ast.Assign):
        yield from ((t, scope) for target in node.targets for t in _single(target))
        return
    called = getattr(scope, "name", "")
    for caller in (tree, *syntax.functions(tree)):
        for call in (n for n in syntax.own_nodes(caller) if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) and _callee(n.value) == called):
            yield from ((t, caller) for target in call.targets for t in _single(target))


def _entry(node: ast.AST) -> str:
    """The key of `state["step"]` and `state.get("step", 0)`, where it is a count's."""
    key: ast.expr | None = None
    if isinstance(node, ast.Subscript):
        key = node.slice
    elif isinstance(node, ast.Call) and _callee(node) == "get" and node.args:
        key = node.args[0]
    text = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""
    return text if COUNT.search(text.lower()) else ""


def _bounds_a_loop(target: ast.expr, scope: ast.AST, tree: ast.Module) -> bool:
    if isinstance(target, ast.Name):
        return any(isinstance(n, ast.Name) and n.id == target.id for n in _bounds(syntax.own_nodes(scope)))
    return isinstance(target, ast.Attribute) and any(isinstance(n, ast.Attribute) and n.attr == target.attr for n in _bounds(syntax.nodes(tree)))


def _bounds(nodes: tuple[ast.AST, ...]) -> Iterator[ast.AST]:
    """What is compared in the condition of a `while`, and what the `range` of a `for` begins with."""
    for node in nodes:
        if isinstance(node, ast.While):
            for compared in (n for n in ast.walk(node.test) if isinstance(n, ast.Compare)):
                yield from ast.walk(compared)
        elif isinstance(node, ast.For):
            for call in (n for n in ast.walk(node.iter) if isinstance(n, ast.Call) and n.args):
                if _callee(call) == "count" or (_callee(call) in ("range", "trange") and len(call.args) > 1):
                    yield from ast.walk(call.args[0])


def _single(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _single(element)
    else:
        yield target


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
