"""The user's source as syntax. Read in the rank, from source that is on its disk anyway; parsed once a file, walked once a scope.

A walk over a file of 300 lines costs about 5 ms, and the sensors ask dozens of times at the first steps: what was walked is kept.
"""

from __future__ import annotations

import ast
import linecache
from functools import cache

MAX_SOURCE_LINES = 20_000
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def tree(file: str) -> ast.Module | None:
    """None where there is no source, or none that can be parsed."""
    lines = linecache.getlines(file)
    try:
        return ast.parse("".join(lines)) if 0 < len(lines) <= MAX_SOURCE_LINES else None
    except (SyntaxError, ValueError, RecursionError):
        return None


@cache
def nodes(scope: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a file, a function or a loop, breadth first: ast.walk, kept."""
    return tuple(ast.walk(scope))


@cache
def own_nodes(scope: ast.AST) -> tuple[ast.AST, ...]:
    """Nodes of a scope without those of functions and classes defined inside it; lambdas are part of it."""
    found: list[ast.AST] = []
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found.append(node)
            todo.extend(ast.iter_child_nodes(node))
    return tuple(found)


@cache
def functions(module: ast.Module) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    return tuple(n for n in nodes(module) if isinstance(n, FUNCTIONS))


@cache
def function_at(module: ast.Module, line: int) -> Function:
    """The innermost function that holds this line, or the module."""
    around = [f for f in functions(module) if spans(f, line)]
    return max(around, key=lambda f: f.lineno) if around else module


def spans(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def division(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """(what is divided, by what) of `a / b`, `a /= b`, `a.div(b)`; None for anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.left, node.right
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return node.target, node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("div", "div_", "true_divide") and node.args:
        return node.func.value, node.args[-1]
    return None
