"""Looks a statement up in the user's source where no call can be hooked, e.g. `p.requires_grad = True`. Read in the rank, parsed once."""

from __future__ import annotations

import ast
from functools import cache

from . import syntax
from .sites import Site


def assignments(file: str, attribute: str) -> list[Site]:
    """Statements in `file` that assign to `<anything>.<attribute>`, in order."""
    tree = syntax.tree(file)
    found: list[Site] = []
    for node in syntax.nodes(tree) if tree is not None else ():
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []
        )
        if any(isinstance(t, ast.Attribute) and t.attr == attribute for t in targets):
            found.append((file, node.lineno, ""))  # type: ignore[attr-defined]
    return sorted(found, key=lambda s: s[1])


def rebinds(file: str) -> list[Site]:
    """Statements in `file` that give parameters other memory: `p.data = ...`, and torch's vector_to_parameters, which does that."""
    tree = syntax.tree(file)
    calls: list[Site] = [
        (file, node.lineno, getattr(syntax.function_at(tree, node.lineno), "name", ""))
        for node in (syntax.nodes(tree) if tree is not None else ())
        if tree is not None and isinstance(node, ast.Call)
        and (getattr(node.func, "attr", "") == "vector_to_parameters" or getattr(node.func, "id", "") == "vector_to_parameters")
    ]  # fmt: skip
    return sorted({*assignments(file, "data"), *calls}, key=lambda s: s[1])


@cache
def item_set_at(file: str, key: str) -> Site | None:
    """The first statement in `file` that sets `<anything>["key"]`."""
    tree = syntax.tree(file)
    for node in (n for n in (syntax.nodes(tree) if tree is not None else ()) if isinstance(n, ast.Assign)):
        if any(isinstance(t, ast.Subscript) and isinstance(t.slice, ast.Constant) and t.slice.value == key for t in node.targets):
            return (file, node.lineno, "")
    return None


@cache
def gradient_writes(file: str) -> tuple[Site, ...]:
    """Statements in `file` that give a `.grad` other values: an assignment of anything but None, `p.grad /= n`, `p.grad.div_(n)`; in order."""
    tree = syntax.tree(file)
    found: set[Site] = set()
    for node in syntax.nodes(tree) if tree is not None else ():
        if isinstance(node, ast.Assign) and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            hit = any(_is_gradient(t) for t in node.targets)
        elif isinstance(node, ast.AugAssign):
            hit = _is_gradient(node.target)
        else:
            call = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
            hit = call is not None and _is_gradient(call.value) and call.attr.endswith("_") and call.attr not in UNWRITTEN
        if hit:
            found.add((file, node.lineno, ""))  # type: ignore[attr-defined]
    return tuple(sorted(found, key=lambda s: s[1]))


UNWRITTEN = ("zero_", "detach_", "requires_grad_", "share_memory_")  # in-place methods that are no new gradient


def _is_gradient(node: ast.expr) -> bool:
    """`p.grad` or `p.grad.data`."""
    if isinstance(node, ast.Attribute) and node.attr == "data":
        node = node.value
    return isinstance(node, ast.Attribute) and node.attr == "grad"


@cache
def writes(file: str, line: int, attribute: str) -> Site | None:
    """The first statement of the function at `line` that assigns to `.attribute` or calls an in-place method (`mul_`, `copy_`, ...) of it."""
    tree = syntax.tree(file)
    for scope in syntax.nodes(tree) if tree is not None else ():
        if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) and _begins(scope) <= line <= scope.lineno:
            for node in sorted((n for n in syntax.nodes(scope) if isinstance(n, ast.Attribute)), key=lambda n: n.lineno):
                if node.attr == attribute and (isinstance(node.ctx, ast.Store) or _in_place(scope, node)):
                    return (file, node.lineno, scope.name)
    return None


def _begins(scope: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Where Python says that it begins: at its first decorator."""
    return min(scope.lineno, *(d.lineno for d in scope.decorator_list), scope.lineno)


def _in_place(scope: ast.AST, owner: ast.Attribute) -> bool:
    return any(isinstance(n, ast.Attribute) and n.value is owner and n.attr.endswith("_") and not n.attr.endswith("__") for n in syntax.nodes(scope))


@cache
def loss_made_at(file: str, line: int) -> Site | None:
    """The statement that made the loss of a backward at `line`: the nearest assignment before it, in
    the same function, to the name it is called on."""
    tree = syntax.tree(file)
    if tree is None:
        return None
    scope = syntax.function_at(tree, line)
    call = next(
        (n for n in syntax.nodes(scope) if isinstance(n, ast.Attribute) and n.attr == "backward" and n.lineno <= line <= (n.end_lineno or 0)),
        None,
    )
    name = _loss_name(call.value) if call is not None else None
    if name is None:
        return None
    made = [n for n in syntax.nodes(scope) if isinstance(n, ast.Assign) and n.lineno < line and any(name in _targets(t) for t in n.targets)]
    best = max(made, key=lambda n: n.lineno, default=None)
    return (file, best.lineno, getattr(scope, "name", "")) if best is not None else None


def _loss_name(node: ast.expr) -> str | None:
    """`loss`, `(loss / n)`, `scaler.scale(loss)`: the first name that is no attribute's owner."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.BinOp):
        return _loss_name(node.left)
    if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute) and node.func.attr == "scale":
        return _loss_name(node.args[0])
    return None


def _targets(node: ast.expr) -> set[str]:
    if isinstance(node, ast.Name):
        return {node.id}
    return {e.id for e in node.elts if isinstance(e, ast.Name)} if isinstance(node, (ast.Tuple, ast.List)) else set()


@cache
def step_condition(file: str, line: int) -> Site | None:
    """The innermost `if` around the first optimizer's or scaler's `.step(...)` behind `line` in the same function; the call where there is none."""
    tree = syntax.tree(file)
    scope = syntax.function_at(tree, line) if tree is not None else None
    calls = [n for n in syntax.nodes(scope) if isinstance(n, ast.Call) and n.lineno > line and _steps(n)] if scope is not None else []
    call = min(calls, key=lambda n: n.lineno, default=None)
    if scope is None or call is None:
        return None
    place = max((found for found in _conditions(scope, call) if found > line), default=call.lineno)
    return (file, place, getattr(scope, "name", ""))


@cache
def guarded_steps(file: str) -> tuple[Site, ...]:
    """The innermost `if` around each optimizer's or scaler's `.step(...)` of a file, where there is one in the same function."""
    tree = syntax.tree(file)
    found: set[Site] = set()
    for call in syntax.nodes(tree) if tree is not None else ():
        if tree is None or not isinstance(call, ast.Call) or not _steps(call):
            continue
        scope = syntax.function_at(tree, call.lineno)
        if around := _conditions(scope, call):
            found.add((file, max(around), getattr(scope, "name", "")))
    return tuple(sorted(found))


def _conditions(scope: syntax.Function, call: ast.Call) -> list[int]:
    """Lines of the `if`s of a function under which a call stands; not of those of which it is the `else`."""
    return [n.lineno for n in syntax.nodes(scope) if isinstance(n, ast.If) and any(syntax.spans(b, call.lineno) for b in n.body)]


def _steps(call: ast.Call) -> bool:
    """`optimizer.step()` or `scaler.step(optimizer)`; a scheduler's or a profiler's has another name and takes no argument."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    owner = call.func.value
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return "opt" in name.lower() or bool(call.args)
