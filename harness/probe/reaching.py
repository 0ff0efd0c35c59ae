"""All that may go into a value, as the source shows it: through names, parameters, attributes, what functions return and what is put into lists.

Takes in too much rather than too little: for a fact that the run itself has shown, and of which only the origin is asked.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from . import syntax, valuesources

Trees = tuple[tuple[str, ast.Module], ...]  # the user's files
Placed = tuple[ast.AST, ast.Module]
MAX_NODES = 1500
FILLS = {"append", "extend", "add", "insert", "update"}
PLACES = {"to", "cuda", "device", "len"}  # what they are given says where a tensor lies, or only how long it is


def into(value: ast.AST, tree: ast.Module, trees: Trees) -> list[Placed]:
    """Nearest first."""
    found: list[Placed] = []
    seen: set[int] = set()
    todo: list[Placed] = [(value, tree)]
    while todo and len(found) < MAX_NODES:
        node, where = todo.pop(0)
        if id(node) in seen:
            continue
        seen.add(id(node))
        found.append((node, where))
        todo.extend((child, where) for child in _parts(node))
        todo.extend(_behind(node, where, trees))
    return found


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and valuesources.callee(node) in PLACES:
        if isinstance(node.func, ast.Attribute):
            yield node.func.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield node.func.value  # the method's name is no attribute that somebody assigns
        yield from node.args
        yield from (k.value for k in node.keywords if k.arg != "device")
    else:
        yield from (c for c in ast.iter_child_nodes(node) if not (isinstance(c, ast.keyword) and c.arg == "device"))


def _behind(node: ast.AST, tree: ast.Module, trees: Trees) -> Iterator[Placed]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield from of_name(node, tree, trees)
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield from of_attribute(node.attr, trees)
    elif isinstance(node, ast.Call):
        yield from results(node, tree, trees)


def results(call: ast.Call, tree: ast.Module, trees: Trees) -> list[Placed]:
    """What functions of the called name return; of an object that is called, what its class's `__call__` or `forward` does."""
    found: list[Placed] = [(v, t) for _, t in trees for function in _functions(t).get(valuesources.callee(call), ()) for v in _results(function)]
    if found or not isinstance(call.func, (ast.Name, ast.Attribute)):
        return found
    made = of_name(call.func, tree, trees) if isinstance(call.func, ast.Name) else of_attribute(call.func.attr, trees)
    kinds = {valuesources.callee(v) for v, _ in made if isinstance(v, ast.Call)}
    return [(v, t) for _, t in trees for kind in kinds for method in _called(t).get(kind, ()) for v in _results(method)]


def of_name(name: ast.Name, tree: ast.Module, trees: Trees) -> list[Placed]:
    """What a name is given where it stands: in its function, by the callers of that, or in the file."""
    scope = syntax.function_at(tree, name.lineno)
    found: list[Placed] = [(v, tree) for v in given(scope).get(name.id, ())]
    if isinstance(scope, syntax.FUNCTIONS):
        names = [a.arg for a in (*scope.args.args, *scope.args.kwonlyargs)]
        if name.id in names:
            return found + list(_passed(scope, name.id, tree, trees))
    return found or [(v, tree) for v in given(tree).get(name.id, ())]


def of_attribute(name: str, trees: Trees) -> Iterator[Placed]:
    """What any class assigns to `self.name`, or returns as the property of that name."""
    for _, tree in trees:
        yield from ((v, tree) for v in _attributes(tree).get(name, ()))
        yield from ((v, tree) for f in _functions(tree).get(name, ()) if f.decorator_list for v in _results(f))


@cache
def given(scope: ast.AST) -> dict[str, list[ast.expr]]:
    """Name -> what one scope assigns to it, puts into it, or runs it over."""
    found: dict[str, list[ast.expr]] = {}
    for node in syntax.own_nodes(scope):
        for target, value in _assigned(node):
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(value)
    return found


@cache
def _attributes(tree: ast.Module) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in syntax.nodes(tree):
        for target, value in _assigned(node):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found.setdefault(target.attr, []).append(value)
    return found


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _unpacked(target, node.value)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
        yield from _unpacked(node.target, node.value)
    elif isinstance(node, (ast.For, ast.comprehension)):
        yield from _unpacked(node.target, node.iter)
    elif isinstance(node, ast.With):
        for item in node.items:
            if item.optional_vars is not None:
                yield from _unpacked(item.optional_vars, item.context_expr)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FILLS:
        yield from ((node.func.value, value) for value in node.args)


def _unpacked(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, (ast.Tuple, ast.List)):
        same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
        for i, part in enumerate(target.elts):
            yield from _unpacked(part, value.elts[i] if same else value)  # type: ignore[attr-defined]
    elif isinstance(target, ast.Subscript):
        yield target.value, value
    else:
        yield target, value


def _passed(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str, tree: ast.Module, trees: Trees) -> Iterator[Placed]:
    """What calls pass for a parameter."""
    owner = valuesources.owner_of(tree, function.lineno)
    position = next((i for i, a in enumerate(function.args.args) if a.arg == name), -1) - (owner is not None)
    for other, call in callers(function, tree, trees):
        by_name = next((k.value for k in call.keywords if k.arg == name), None)
        if by_name is not None or 0 <= position < len(call.args):
            yield by_name if by_name is not None else call.args[position], other


def callers(function: ast.FunctionDef | ast.AsyncFunctionDef, tree: ast.Module, trees: Trees) -> list[tuple[ast.Module, ast.Call]]:
    """Calls of a function, or of the class that it initialises, by name."""
    owner = valuesources.owner_of(tree, function.lineno)
    called = owner.name if owner is not None and function.name == "__init__" else function.name
    return [(other, call) for _, other in trees for call in _calls(other).get(called, ())]


@cache
def _calls(tree: ast.Module) -> dict[str, list[ast.Call]]:
    found: dict[str, list[ast.Call]] = {}
    for node in syntax.nodes(tree):
        if isinstance(node, ast.Call):
            found.setdefault(valuesources.callee(node), []).append(node)
    return found


@cache
def _functions(tree: ast.Module) -> dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]:
    found: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
    for function in syntax.functions(tree):
        found.setdefault(function.name, []).append(function)
    return found


@cache
def _called(tree: ast.Module) -> dict[str, list[ast.FunctionDef]]:
    """Class -> what runs when an instance of it is called."""
    classes = [n for n in syntax.nodes(tree) if isinstance(n, ast.ClassDef)]
    return {c.name: [m for m in c.body if isinstance(m, ast.FunctionDef) and m.name in ("__call__", "forward")] for c in classes}


@cache
def _results(function: ast.AST) -> tuple[ast.expr, ...]:
    return tuple(n.value for n in syntax.own_nodes(function) if isinstance(n, (ast.Return, ast.Yield)) and n.value is not None)
