"""A list that is shuffled with a seed that holds the rank, and of which every n-th entry is taken from the rank on: each rank cuts an order of its own.

Only a place to point at: what the ranks draw decides whether they overlap.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from . import copyreads, cuts, rankcuts, reaching, sites, strides, syntax, valuesources

ENTRIES = frozenset({"__init__", "__iter__"})
ORDERS = {"randperm", "permutation", "permuted", "sample"}
SEEDED = {"Random", "RandomState", "default_rng", "manual_seed", "seed"}


def told(dataset: Any, made: list[Any] | None) -> dict[str, Any] | None:
    """The shuffle, where its seed names the rank; the statement that made the data set, where the seed came with the rank in it; else None."""
    names = cuts.user_files()
    if len(names) > cuts.MAX_FILES:
        return None
    trees = tuple((name, tree) for name in names if (tree := syntax.tree(name)) is not None)
    for file, method in copyreads.sources(type(dataset), ENTRIES):
        tree = syntax.tree(file)
        for call, shuffled in _shuffles(method) if tree is not None else ():
            if tree is None or not any(_cut_of(node) == shuffled and rankcuts.by_rank(start, tree, trees) for node, start, _ in strides.taken(method)):
                continue
            seeds = _seeds(call, method)
            here = sites.as_json((file, call.lineno, method.name))
            if any(rankcuts.by_rank(s, tree, trees, 0) for s in seeds):
                return here
            if any(rankcuts.by_rank(s, tree, trees) for s in seeds):
                return made[0] if made and isinstance(made[0], dict) else here
    return None


def _shuffles(method: ast.FunctionDef) -> Iterator[tuple[ast.Call, str]]:
    """(call, what is in another order then) of `rng.shuffle(files)` and `order = rng.permutation(files)`."""
    for node in syntax.own_nodes(method):
        if isinstance(node, ast.Call) and valuesources.callee(node) == "shuffle" and node.args:
            yield node, ast.unparse(node.args[0])
        elif isinstance(node, ast.Assign):
            calls = [n for n in ast.walk(node.value) if isinstance(n, ast.Call) and valuesources.callee(n) in ORDERS]
            yield from ((calls[0], ast.unparse(t)) for t in node.targets if calls)


def _cut_of(node: ast.expr) -> str:
    """What is cut in `files[rank::world]`, `islice(files, rank, None, world)`."""
    value = node.value if isinstance(node, ast.Subscript) else node.args[0] if isinstance(node, ast.Call) and node.args else None
    return ast.unparse(value) if value is not None else ""


def _seeds(call: ast.Call, method: ast.FunctionDef) -> list[ast.expr]:
    """What seeds the generator of a shuffle, in the same method."""
    named = next((k.value for k in call.keywords if k.arg == "generator"), None)
    generator = named if named is not None else call.func.value if isinstance(call.func, ast.Attribute) else None
    if generator is None:
        return []
    made = reaching.given(method).get(generator.id, []) if isinstance(generator, ast.Name) else []
    inside = [n for value in (generator, *made) for n in ast.walk(value)]
    later = [n for n in syntax.own_nodes(method) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    inside += [n for n in later if ast.unparse(n.func.value) == ast.unparse(generator)]  # type: ignore[attr-defined]
    calls = [n for n in inside if isinstance(n, ast.Call) and valuesources.callee(n) in SEEDED]
    return [a for n in calls for a in (*n.args, *(k.value for k in n.keywords))]
