"""Running values of a module, as its source shows them: attributes that a method updates from what they were, and that forward then computes with.

`self.mean.lerp_(x.mean(0), 0.1)`, `self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`, `self.total += x.sum(0)`. What is read only where the
module trains, or only by the update itself, is bookkeeping; what a layer makes of its last output (`self.h = self.cell(x, self.h)`), and what a method sets
anew (a reset), is the state of a sequence and not of the model.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FunctionType

from . import drawn, sites, syntax

IN_PLACE = {"lerp_", "mul_", "add_", "sub_", "div_", "addcmul_", "addcdiv_"}
FILLS = {"zero_", "fill_"}
MAX_CALLS = 2  # methods of its own, one from the other, that a forward computes with the value in
OWN_STATE = ("get_extra_state", "state_dict", "_save_to_state_dict")  # a class that writes one of these says itself what is saved


def attributes(kind: type) -> dict[str, sites.Site]:
    """Attribute -> the statement that updates it."""
    if any(drawn.code_of(kind, name) is not None for name in OWN_STATE):
        return {}
    updated: dict[str, sites.Site] = {}
    for function, file in _methods(kind):
        for name, node in _updates(function):
            updated.setdefault(name, (file, node.lineno, function.name))
    read = _computed_with(kind, "forward", MAX_CALLS) if updated else set()
    reset = {name for function, _ in _methods(kind) for name in _set_anew(function)} if read else set()
    return {name: at for name, at in sorted(updated.items(), key=lambda item: item[1]) if name in read and name not in reset}


def _methods(kind: type) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Of the user's classes among its bases. Looked up without asking the class: a descriptor of its own may raise."""
    known: set[str] = {"__init__"}
    for base in kind.__mro__:
        for name, member in list(vars(base).items()):
            code = getattr(member, "__code__", None) if isinstance(member, FunctionType) else None
            if code is not None and name not in known and sites.is_user_file(code.co_filename) and (function := drawn.function_of(code)) is not None:
                yield function, code.co_filename
            known.add(name)


def _owner(function: ast.FunctionDef) -> str:
    return function.args.args[0].arg if function.args.args else ""


def _updates(function: ast.FunctionDef) -> Iterator[tuple[str, ast.stmt]]:
    """(attribute, statement) of each update of an attribute from itself."""
    owner = _owner(function)
    for node in sorted((n for n in syntax.own_nodes(function) if isinstance(n, ast.stmt)), key=lambda n: n.lineno):
        if isinstance(node, ast.AugAssign) and drawn.is_own(node.target, owner):
            yield node.target.attr, node  # type: ignore[union-attr]
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if drawn.is_own(target, owner) and _mixes(node.value, target.attr, owner):  # type: ignore[attr-defined]
                    yield target.attr, node  # type: ignore[attr-defined]
        elif isinstance(node, ast.Expr) and (found := _changed_in_place(node.value, owner)):
            yield found, node


def _set_anew(function: ast.FunctionDef) -> Iterator[str]:
    """Attributes that a method assigns, or fills, without a look at what they were."""
    owner = _owner(function)
    for node in syntax.own_nodes(function):
        if isinstance(node, ast.Assign):
            read = {n.attr for n in ast.walk(node.value) if isinstance(n, ast.Attribute) and drawn.is_own(n, owner)}
            yield from (t.attr for t in node.targets if drawn.is_own(t, owner) and t.attr not in read)  # type: ignore[attr-defined]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FILLS and drawn.is_own(node.func.value, owner):
            yield node.func.value.attr  # type: ignore[attr-defined]


def _mixes(value: ast.expr, name: str, owner: str) -> bool:
    """Whether it is a sum that holds the attribute, or a `lerp` of it."""
    if isinstance(value, ast.BinOp):
        sides = (value.left, value.right)
        return any(_is(side, name, owner) or _mixes(side, name, owner) for side in sides)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "lerp":
        return any(_is(part, name, owner) for part in (value.func.value, *value.args[:1]))
    return False


def _is(node: ast.expr, name: str, owner: str) -> bool:
    return drawn.is_own(node, owner) and node.attr == name  # type: ignore[attr-defined]


def _changed_in_place(value: ast.expr, owner: str) -> str:
    """The attribute that a chain of calls begins at, `self.mean.mul_(m).add_(x)`; "" where there is none, or it is not changed."""
    changed = False
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        copied = value.func.attr == "copy_" and bool(value.args) and drawn.is_own(value.func.value, owner)
        changed = changed or value.func.attr in IN_PLACE
        if copied and _mixes(value.args[0], value.func.value.attr, owner):  # type: ignore[attr-defined]
            changed = True
        value = value.func.value
    return value.attr if changed and drawn.is_own(value, owner) else ""  # type: ignore[attr-defined]


def _computed_with(kind: type, method: str, depth: int) -> set[str]:
    """Attributes that the method reads outside of updates and of what is done in training only, itself or through its own methods."""
    code = drawn.code_of(kind, method)
    function = drawn.function_of(code) if code is not None else None
    if function is None:
        return set()
    owner = _owner(function)
    updates = {id(node) for _, node in _updates(function)}
    found = {n.attr for n in _at_any_time(function, updates) if isinstance(n, ast.Attribute) and drawn.is_own(n, owner) and isinstance(n.ctx, ast.Load)}
    for name in sorted(found) if depth else ():
        if any(isinstance(vars(base).get(name), FunctionType) for base in kind.__mro__):
            found = found | _computed_with(kind, name, depth - 1)
    return found


def _at_any_time(scope: ast.AST, without: set[int]) -> Iterator[ast.AST]:
    for _, value in ast.iter_fields(scope):
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or id(node) in without:
                continue
            if isinstance(node, ast.If) and (trains := _asks_for_training(node.test)) is not None:
                for other in node.orelse if trains else node.body:
                    yield from (other, *_at_any_time(other, without))
                if not trains and isinstance(node.body[-1], (ast.Return, ast.Raise)):
                    return  # what follows is done in training only
                continue
            yield node
            yield from _at_any_time(node, without)


def _asks_for_training(test: ast.expr) -> bool | None:
    """True for `self.training` (and more), False for `not self.training`; None for a question of another kind."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _asks_for_training(test.operand)
        return None if inner is None else not inner
    return True if any(isinstance(n, ast.Attribute) and n.attr == "training" for n in ast.walk(test)) else None


def named_outside(file: str, name: str, classes: set[str]) -> bool:
    """Whether code outside of these classes reaches for an attribute of this name: it may save it in a way of its own. `x.mean(0)` calls
    something else of that name."""
    tree = syntax.tree(file)
    if tree is None:
        return True
    inside = {id(n) for c in syntax.nodes(tree) if isinstance(c, ast.ClassDef) and c.name in classes for n in ast.walk(c)}
    called = {id(n.func) for n in syntax.nodes(tree) if isinstance(n, ast.Call)}
    return any(id(n) not in inside and id(n) not in called and _names(n, name) for n in syntax.nodes(tree))


def _names(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == name
    keys: list[ast.expr | None] = []
    if isinstance(node, ast.Dict):
        keys = list(node.keys)
    elif isinstance(node, ast.Subscript):
        keys = [node.slice]
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr"):
        keys = list(node.args[1:2])
    return any(isinstance(k, ast.Constant) and k.value == name for k in keys)
