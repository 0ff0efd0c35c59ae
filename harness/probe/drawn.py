"""What a module's constructor draws at random into an attribute, and which attributes its forward reads, as the source shows it."""

from __future__ import annotations

import ast
from types import CodeType
from typing import Any

from . import picks, sites, syntax

DRAWS = {
    "randn", "rand", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "randn_like", "rand_like", "randint_like",
    "normal_", "uniform_", "exponential_", "bernoulli_", "trunc_normal_", "orthogonal_", "xavier_normal_", "xavier_uniform_",
    "kaiming_normal_", "kaiming_uniform_", "standard_normal", "uniform",
}  # fmt: skip
MAX_CALLS = 3  # methods of its own, one from the other, that a forward reads through


def attributes(kind: type) -> dict[str, sites.Site]:
    """Attribute -> the statement of the constructor that draws it, of those that forward reads. A draw from a generator that the script
    passes is another thing: it says itself which numbers it wants."""
    made, reads = code_of(kind, "__init__"), code_of(kind, "forward")
    if made is None or reads is None:
        return {}
    constructor = function_of(made)
    drawn = _drawn(constructor, made.co_filename) if constructor is not None else {}
    read = _read(kind, "forward", MAX_CALLS) if drawn else set()
    return {name: at for name, at in drawn.items() if name in read}


def code_of(kind: type, method: str) -> CodeType | None:
    code: Any = getattr(getattr(kind, method, None), "__code__", None)
    return code if code is not None and sites.is_user_file(code.co_filename) else None


def function_of(code: CodeType) -> ast.FunctionDef | None:
    tree = syntax.tree(code.co_filename)
    for node in syntax.functions(tree) if tree is not None else ():
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name and first == code.co_firstlineno:
            return node
    return None


def _drawn(constructor: ast.FunctionDef, file: str) -> dict[str, sites.Site]:
    owner = constructor.args.args[0].arg if constructor.args.args else ""
    local: set[str] = set()
    found: dict[str, sites.Site] = {}
    for node in sorted((n for n in syntax.own_nodes(constructor) if isinstance(n, ast.Assign)), key=lambda n: n.lineno):
        if not _draws(node.value, local):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                local.add(target.id)
            elif is_own(target, owner):
                found[target.attr] = (file, node.lineno, "__init__")  # type: ignore[attr-defined]
    return found


def _draws(value: ast.expr, local: set[str]) -> bool:
    for node in ast.walk(value):
        if isinstance(node, ast.Name) and node.id in local:
            return True
        if isinstance(node, ast.Call) and _callee(node) in DRAWS and not any(k.arg == "generator" for k in node.keywords):
            return True
    return False


def _read(kind: type, method: str, depth: int) -> set[str]:
    code = code_of(kind, method)
    function = function_of(code) if code is not None else None
    if function is None or not function.args.args:
        return set()
    owner = function.args.args[0].arg
    named = {n.attr for n in syntax.nodes(function) if isinstance(n, ast.Attribute) and is_own(n, owner) and isinstance(n.ctx, ast.Load)}
    found = {name for name in named if not picks.only_picked(function, owner, name)}
    for name in sorted(named) if depth else ():
        if callable(getattr(kind, name, None)):
            found = found | _read(kind, name, depth - 1)
    return found


def is_own(node: ast.AST, owner: str) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
