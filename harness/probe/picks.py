"""Whether a function takes of a tensor only entries that it picks at random: a bank of noise, of which no entry has a meaning of its own."""

from __future__ import annotations

import ast

from . import syntax

DRAWS = {
    "randn", "rand", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "randn_like", "rand_like", "randint_like",
    "normal_", "uniform_", "random_", "exponential_", "bernoulli_", "trunc_normal_", "standard_normal", "uniform", "integers", "permutation",
    "randrange", "choice", "choices", "sample", "random", "getrandbits",
}  # fmt: skip
BY_INDEX = {"index_select", "take", "take_along_dim", "gather", "embedding", "roll", "narrow", "choice", "choices", "sample"}
SIZES = {"shape", "size", "numel", "dim", "ndim", "dtype", "device", "type"}
MOVES = {"to", "cpu", "cuda", "float", "double", "half", "type_as", "detach", "view", "reshape", "flatten", "unsqueeze", "contiguous", "clone"}
MAX_NAMES = 16


def only_picked(function: ast.FunctionDef, owner: str, attribute: str) -> bool:
    """Every read of the attribute, and of the locals that are the same tensor, picks entries by a random draw or asks for a size."""
    parents = {child: node for node in syntax.nodes(function) for child in ast.iter_child_nodes(node)}
    random = _random_names(function)
    names: set[str] = set()
    todo: list[ast.AST] = [n for n in syntax.nodes(function) if isinstance(n, ast.Attribute) and _is(n, owner, attribute) and isinstance(n.ctx, ast.Load)]
    while todo:
        node = todo.pop()
        alias = _alias(node, parents)
        if isinstance(alias, ast.Attribute) and _is(alias, owner, attribute):
            continue  # `self.bank = self.bank.to(device)`
        if isinstance(alias, ast.Name) and alias.id not in names and len(names) < MAX_NAMES:
            names.add(alias.id)
            todo += [n for n in syntax.nodes(function) if isinstance(n, ast.Name) and n.id == alias.id and isinstance(n.ctx, ast.Load)]
        elif alias is None and not _picks(node, parents, random):
            return False
    return True


def _is(node: ast.AST, owner: str, attribute: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.value, ast.Name) and node.value.id == owner


def _alias(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.expr | None:
    """What the tensor itself, at most moved to another device or another shape, is assigned to."""
    above = parents.get(node)
    while isinstance(above, (ast.Attribute, ast.Call)) and _moved(node, above):
        node, above = above, parents.get(above)
    return above.targets[0] if isinstance(above, ast.Assign) and above.value is node and len(above.targets) == 1 else None


def _moved(node: ast.AST, above: ast.Attribute | ast.Call) -> bool:
    return above.attr in MOVES if isinstance(above, ast.Attribute) else above.func is node


def _picks(node: ast.AST, parents: dict[ast.AST, ast.AST], random: set[str]) -> bool:
    above = parents.get(node)
    while isinstance(above, (ast.Attribute, ast.Call, ast.Subscript)):
        if isinstance(above, ast.Attribute) and above.attr in SIZES:
            return True
        if isinstance(above, ast.Subscript):
            return above.value is node and draws(above.slice, random)
        if isinstance(above, ast.Call) and above.func is not node:
            callee = _callee(above)
            others = [a for a in (*above.args, *(k.value for k in above.keywords)) if a is not node]
            return callee == "len" or (callee in BY_INDEX and (callee in DRAWS or any(draws(a, random) for a in others)))
        if isinstance(above, ast.Call) and isinstance(above.func, ast.Attribute) and above.func.attr in BY_INDEX:
            return any(draws(a, random) for a in (*above.args, *(k.value for k in above.keywords)))
        if not _moved(node, above) and not (isinstance(above, ast.Attribute) and above.attr in BY_INDEX):
            return False
        node, above = above, parents.get(above)
    return False


def _random_names(function: ast.FunctionDef) -> set[str]:
    found: set[str] = set()
    assigned = [n for n in syntax.nodes(function) if isinstance(n, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and n.value is not None]
    for node in sorted(assigned, key=lambda n: n.lineno):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is not None and draws(node.value, found):
            found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return found


def draws(value: ast.AST, random: set[str]) -> bool:
    """A draw stands in it, or a name that a draw was assigned to."""
    return any((isinstance(n, ast.Name) and n.id in random) or (isinstance(n, ast.Call) and _callee(n) in DRAWS) for n in ast.walk(value))


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
