"""What a piece of the user's code changes without an assignment: `x.add_(y)`, `chain.append(y)`, `torch.mv(a, v, out=u)`.

The source does not say what a method does. One that ends in `_` changes its object, by torch's convention; one that stands as a statement of its own
is called for what it does, to its object or to what it is given.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from . import syntax


def changed(node: ast.AST, imported: set[str]) -> Iterator[str]:
    """Names and attributes; of `rows[name].append(x)` it is `rows`. What a module's function changes is what it is given."""
    if isinstance(node, ast.Call):
        found = [k.value for k in node.keywords if k.arg == "out"]
        if (method := _in_place(node)) is not None:
            found += node.args[:1] if _root(method) in imported else [method.value]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _in_place(node.value) is None:
        found = _by_statement(node.value, imported)
    else:
        return
    for value in found:
        if (path := _path(value)) is not None:
            yield path


def imports(module: ast.Module) -> set[str]:
    found = [a for n in syntax.nodes(module) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names]
    return {a.asname or a.name.split(".")[0] for a in found}


def _by_statement(call: ast.Call, imported: set[str]) -> list[ast.expr]:
    if isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id):
        return []
    given: list[ast.expr] = [a for a in call.args if isinstance(a, ast.Name)]
    if isinstance(call.func, ast.Attribute) and _root(call.func) not in imported:
        return [call.func.value, *given]
    return given


def _in_place(call: ast.Call) -> ast.Attribute | None:
    """The method, where its name says that it changes its object."""
    func = call.func
    return func if isinstance(func, ast.Attribute) and func.attr.endswith("_") and not func.attr.endswith("__") else None


def _path(value: ast.expr) -> str | None:
    """Up to the first index or call in it: a view of a tensor, an entry of a container are parts of it."""
    whole = value
    while not isinstance(value, ast.Name):
        if isinstance(value, ast.Call):
            value = value.func.value if isinstance(value.func, ast.Attribute) else value.func
            whole = value
        elif isinstance(value, ast.Subscript):
            whole = value = value.value
        elif isinstance(value, ast.Attribute):
            value = value.value
        else:
            return None
    return ast.unparse(whole)


def _root(node: ast.expr) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None
