"""Whether a script measures a loss against noise that it draws in the same function, as denoisers do: equal noise is no equal sample."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from . import syntax

NOISE = {
    "randn", "rand", "normal", "uniform", "randn_like", "rand_like", "normal_", "uniform_", "standard_normal", "random_sample", "exponential_", "laplace",
    "sample_noise", "make_noise",
}  # fmt: skip
LOSSES = ("loss", "criterion", "mse", "l1", "huber")
MAX_PASSES = 3  # names of names


def any_of(file: str) -> bool:
    """An argument of a call that is named as a loss is drawn noise."""
    tree = syntax.tree(file) if file else None
    return any(_in(function) for function in (*syntax.functions(tree), tree)) if tree is not None else False


def _in(scope: syntax.Function) -> bool:
    nodes = syntax.own_nodes(scope)
    noise = _names(nodes)
    for call in (n for n in nodes if isinstance(n, ast.Call)):
        callee = (call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")).lower()
        if any(word in callee for word in LOSSES) and any(_noisy(a, noise) for a in (*call.args, *(k.value for k in call.keywords))):
            return True
    return False


def _names(nodes: tuple[ast.AST, ...]) -> set[str]:
    """Names that are noise and nothing else: drawn, moved or reshaped; a sum with data is no longer noise."""
    found: set[str] = set()
    assigned = [n for n in nodes if isinstance(n, ast.Assign) and len(n.targets) == 1]
    for _ in range(MAX_PASSES):
        for node in assigned:
            found |= {name.id for name, value in _pairs(node.targets[0], node.value) if isinstance(name, ast.Name) and _noisy(value, found)}
    return found


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def _noisy(value: ast.expr, names: set[str]) -> bool:
    """`noise`, `torch.randn(...)`, `torch.from_numpy(rng.standard_normal(...).astype(...)).view(...)`, `noise[:n]`, `2 * noise`."""
    if isinstance(value, ast.Name):
        return value.id in names
    if isinstance(value, ast.Call):
        callee = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        inner = value.func.value if isinstance(value.func, ast.Attribute) else None
        return callee in NOISE or (inner is not None and _noisy(inner, names)) or (callee in ("from_numpy", "as_tensor", "tensor") and _any(value.args, names))
    if isinstance(value, (ast.Attribute, ast.Subscript)):
        return _noisy(value.value, names)
    if isinstance(value, ast.BinOp):
        return any(_noisy(a, names) and isinstance(b, ast.Constant) for a, b in ((value.left, value.right), (value.right, value.left)))
    return False


def _any(values: list[ast.expr], names: set[str]) -> bool:
    return any(_noisy(v, names) for v in values)
