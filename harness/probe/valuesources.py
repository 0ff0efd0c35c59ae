"""Where a value in the script comes from: through names, parameters and attributes of self back to what was written for it, as the source shows it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from . import syntax

MAX_DEPTH = 6
Found = tuple[ast.expr, ast.Module, syntax.Function]  # an expression, the file and the function that it stands in


def of(expression: ast.expr, tree: ast.Module, files: tuple[ast.Module, ...], depth: int = MAX_DEPTH) -> list[Found] | None:
    """All expressions that this one may stand for; None where one of them is not to be found."""
    scope = syntax.function_at(tree, expression.lineno)
    given = _given(expression, tree, scope, files)
    if given is None:
        return [(expression, tree, scope)]
    if not given or not depth:
        return None
    found: list[Found] = []
    for value, where in given:
        more = of(value, where, files, depth - 1)
        if more is None:
            return None
        found.extend(more)
    return found


def _given(wanted: ast.expr, tree: ast.Module, scope: syntax.Function, files: tuple[ast.Module, ...]) -> list[tuple[ast.expr, ast.Module]] | None:
    """What is assigned to, or passed for, a name or `self.name`; None for any other expression."""
    if isinstance(wanted, ast.Attribute) and isinstance(wanted.value, ast.Name) and wanted.value.id == "self":
        owner = owner_of(tree, wanted.lineno)
        return [(v, tree) for v in assigned(owner, ast.unparse(wanted))] if owner is not None else []
    if not isinstance(wanted, ast.Name):
        return None
    found = [(v, tree) for v in assigned(scope, wanted.id, own=True)]
    parameters = [a.arg for a in (*scope.args.args, *scope.args.kwonlyargs)] if not isinstance(scope, ast.Module) else []
    if wanted.id in parameters and isinstance(scope, ast.FunctionDef):
        found += _passed(scope, wanted.id, owner_of(tree, scope.lineno), files)
    elif not found:
        found = [(v, tree) for v in assigned(tree, wanted.id, own=True)]
    return found


def assigned(scope: ast.AST, target: str, own: bool = False) -> list[ast.expr]:
    """The values that a scope assigns to a name or attribute, one by one where a tuple is unpacked."""
    found: list[ast.expr] = []
    for node in syntax.own_nodes(scope) if own else syntax.nodes(scope):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
            for left, value in _pairs(node.targets if isinstance(node, ast.Assign) else [node.target], node.value):
                if ast.unparse(left) == target:
                    found.append(value)
        elif isinstance(node, (ast.For, ast.comprehension)) and target in {ast.unparse(n) for n in ast.walk(node.target) if isinstance(n, ast.expr)}:
            found.append(node.iter)  # a number of a loop: whatever is looked for, this is not it
    return found


def _pairs(targets: list[ast.expr], value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in targets:
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else None
        values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else None
        if parts is not None and values is not None and len(parts) == len(values):
            yield from zip(parts, values, strict=True)
        else:
            yield from ((part, value) for part in (parts or [target]))


def _passed(function: ast.FunctionDef, name: str, owner: ast.ClassDef | None, files: tuple[ast.Module, ...]) -> list[tuple[ast.expr, ast.Module]]:
    """What calls of a function, or of the class that it initialises, pass for a parameter; nothing where one of them cannot be read."""
    called = owner.name if owner is not None and function.name == "__init__" else function.name
    position = next((i for i, a in enumerate(function.args.args) if a.arg == name), -1) - (owner is not None)
    found: list[tuple[ast.expr, ast.Module]] = []
    for tree in files:
        for call in (n for n in syntax.nodes(tree) if isinstance(n, ast.Call) and callee(n) == called):
            by_name = next((k.value for k in call.keywords if k.arg == name), None)
            plain = 0 <= position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args)
            value = by_name if by_name is not None else call.args[position] if plain else None
            if value is None:
                return []
            found.append((value, tree))
    return found


@cache
def owner_of(tree: ast.Module, line: int) -> ast.ClassDef | None:
    """The innermost class around a line."""
    around = [n for n in syntax.nodes(tree) if isinstance(n, ast.ClassDef) and syntax.spans(n, line)]
    return max(around, key=lambda n: n.lineno) if around else None


def callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
