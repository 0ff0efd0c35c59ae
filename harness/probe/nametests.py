"""Tests of parameters' names in a loop, `name.startswith("backbone.")`, `name in SKIP`: what they say of other names than those they are given.

Read from the source, with the values that the running frame's variables have; what is not plain text, numbers and containers of these is left alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from inspect import getattr_static
from typing import Any

from . import syntax

PLAIN = (str, int, float, bool, type(None), tuple, list, set, frozenset, dict, slice)
OF_TEXT = {"startswith", "endswith", "split", "rsplit", "partition", "rpartition", "lower", "removeprefix", "removesuffix", "replace", "find"}
SEARCHES: dict[str, Callable[..., Any]] = {"match": re.match, "fullmatch": re.fullmatch, "search": re.search}
COMPARES: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: lambda a, b: a == b, ast.NotEq: lambda a, b: a != b, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FILLS = {"append", "extend", "add", "setdefault", "update", "requires_grad_"}
MAX_ITEMS = 2000
Lookup = Callable[[str], Any]


class Unknown(Exception):
    """Something that is not read here."""


class Loop:
    """One loop over `model.named_parameters()`: the name's variable, and what is done with it."""

    def __init__(self, variable: str, parts: list[ast.AST]) -> None:
        self.variable = variable
        self.nodes = [n for part in parts for n in syntax.nodes(part)]
        self.parts = parts
        stored = [n.id for n in self.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self.stored = set(stored)
        simple = [(n.targets[0].id, n.value) for n in self.nodes if isinstance(n, ast.Assign) and len(n.targets) == 1 and isinstance(n.targets[0], ast.Name)]
        self.aliases = {name: value for name, value in simple if stored.count(name) == 1}

    def value(self, node: ast.AST, name: str, lookup: Lookup) -> Any:
        """What an expression of the loop comes to for a parameter of this name."""

        def find(wanted: str) -> Any:
            if wanted == self.variable:
                return name
            if wanted in self.aliases and self.mentions(self.aliases[wanted]):
                return self.value(self.aliases[wanted], name, lookup)
            if wanted in self.stored:
                raise Unknown
            return lookup(wanted)

        return evaluate(node, find)

    def mentions(self, node: ast.AST) -> bool:
        names = {n.id for n in syntax.nodes(node) if isinstance(n, ast.Name)}
        return self.variable in names or any(a in names and self.mentions(v) for a, v in self.aliases.items() if node is not v and a != self.variable)


def loops(tree: ast.Module, line: int) -> Iterator[Loop]:
    """Those over names and parameters that begin at a line; not in any() or all(), which ask how the names are spelt and choose no parameter."""
    calls = (n for n in syntax.nodes(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in ("any", "all"))
    asked = [arg for call in calls for arg in call.args]
    for node in syntax.nodes(tree):
        if isinstance(node, ast.For) and _gives(node.iter, line):
            yield from _loop(node.target, list(node.body))
        elif isinstance(node, COMPREHENSIONS) and len(node.generators) == 1 and _gives(node.generators[0].iter, line) and node not in asked:
            made: list[ast.AST] = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            yield from _loop(node.generators[0].target, [*node.generators[0].ifs, *made])


def _gives(node: ast.expr, line: int) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("list", "sorted", "tuple", "reversed") and node.args:
        node = node.args[0]
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "named_parameters" and syntax.spans(node, line)


def _loop(target: ast.expr, parts: list[ast.AST]) -> Iterator[Loop]:
    if isinstance(target, ast.Tuple) and len(target.elts) == 2 and isinstance(target.elts[0], ast.Name):
        loop = Loop(target.elts[0].id, parts)
        if loop.variable not in loop.stored:
            yield loop


def receiver(tree: ast.Module, line: int) -> str:
    """The variable whose named_parameters() is called at a line; "" where it is no variable."""
    calls = (n for n in syntax.nodes(tree) if isinstance(n, ast.Call) and syntax.spans(n, line))
    owners = [c.func.value for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "named_parameters"]
    return owners[0].id if len(owners) == 1 and isinstance(owners[0], ast.Name) else ""


def blind(loop: Loop, given: list[str], bare: list[str], lookup: Lookup) -> ast.expr | None:
    """The first expression that comes to one and the same for all names that are given, and tells them apart without the wrapper's prefix."""
    for node in (n for part in loop.parts for n in _largest(loop, part, given[0], lookup)):
        if not _names_any(loop, node):
            continue
        try:
            ours, theirs = ({repr(loop.value(node, n, lookup)) for n in names} for names in (given, bare))
        except Exception:  # of the script's own values
            continue
        if len(ours) == 1 and len(theirs) > 1 and _matters(loop, node):
            return node
    return None


def _names_any(loop: Loop, node: ast.expr) -> bool:
    """Whether it holds a text with letters, or a variable that may: `"." in name` asks how deep a parameter lies."""
    inside = syntax.nodes(node)
    words = [n.value for n in inside if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return any(c.isalpha() for word in words for c in word) or any(isinstance(n, ast.Name) and n.id != loop.variable for n in inside)


def _largest(loop: Loop, node: ast.AST, name: str, lookup: Lookup) -> Iterator[ast.expr]:
    if any(node is value for value in loop.aliases.values()) or isinstance(getattr(node, "ctx", None), ast.Store):
        return  # looked at where the variable is used
    if isinstance(node, ast.expr) and loop.mentions(node):
        try:
            loop.value(node, name, lookup)
            yield node
            return
        except Exception:  # of the script's own values
            pass
    for child in ast.iter_child_nodes(node):
        yield from _largest(loop, child, name, lookup)


def _matters(loop: Loop, node: ast.expr) -> bool:
    """Not where it only decides what is printed."""
    around = [n for n in loop.nodes if isinstance(n, ast.If) and any(inner is node for inner in syntax.nodes(n.test))]
    done = [n for one in around for branch in (*one.body, *one.orelse) for n in syntax.nodes(branch)]
    return not around or any(
        isinstance(n, (ast.Assign, ast.AugAssign)) or (isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in FILLS) for n in done
    )


def spelt(loop: Loop, node: ast.expr) -> str:
    """As the source has it; of a variable that the loop sets, what it is set to."""
    return ast.unparse(loop.aliases.get(node.id, node) if isinstance(node, ast.Name) else node)[:120]


def evaluate(node: ast.AST, find: Lookup) -> Any:
    """A value of plain kind; raises Unknown, or what the expression itself raises."""
    value = _value(node, find)
    if not isinstance(value, PLAIN) or (isinstance(value, (tuple, list, set, frozenset, dict)) and len(value) > MAX_ITEMS):
        raise Unknown
    return value


def _value(node: ast.AST, find: Lookup) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return find(node.id)
    if isinstance(node, ast.Attribute):
        owner = find(node.value.id) if isinstance(node.value, ast.Name) else _value(node.value, find)
        return getattr_static(owner, node.attr)  # runs nothing of the script's
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return tuple(evaluate(e, find) for e in node.elts)
    if isinstance(node, ast.Subscript):
        return evaluate(node.value, find)[evaluate(node.slice, find)]
    if isinstance(node, ast.Slice):
        return slice(*(None if part is None else evaluate(part, find) for part in (node.lower, node.upper, node.step)))
    return _of_operator(node, find)


def _of_operator(node: ast.AST, find: Lookup) -> Any:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARES:
        return COMPARES[type(node.ops[0])](evaluate(node.left, find), evaluate(node.comparators[0], find))
    if isinstance(node, ast.BoolOp):
        values = [evaluate(v, find) for v in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not evaluate(node.operand, find)
    if isinstance(node, ast.Call) and not node.keywords:
        return _of_call(node, find)
    raise Unknown


def _of_call(node: ast.Call, find: Lookup) -> Any:
    function = node.func
    if isinstance(function, ast.Name) and function.id in ("any", "all") and len(node.args) == 1 and isinstance(node.args[0], (ast.GeneratorExp, ast.ListComp)):
        return (any if function.id == "any" else all)(_each(node.args[0], find))
    if not isinstance(function, ast.Attribute):
        raise Unknown
    if isinstance(function.value, ast.Name) and function.value.id == "re" and function.attr in SEARCHES:
        return bool(SEARCHES[function.attr](*(evaluate(a, find) for a in node.args)))
    owner = evaluate(function.value, find)
    if (type(owner) is str and function.attr in OF_TEXT) or (type(owner) is dict and function.attr == "get"):
        return getattr(owner, function.attr)(*(evaluate(a, find) for a in node.args))
    raise Unknown


def _each(made: ast.GeneratorExp | ast.ListComp, find: Lookup) -> list[Any]:
    one = made.generators[0]
    if len(made.generators) > 1 or one.ifs or not isinstance(one.target, ast.Name):
        raise Unknown
    target = one.target.id
    return [evaluate(made.elt, lambda wanted, item=item: item if wanted == target else find(wanted)) for item in evaluate(one.iter, find)]  # type: ignore[misc]
