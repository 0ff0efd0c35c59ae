"""Modules that a constructor makes itself and puts into a plain list, tuple or dict of its own, as its source shows: torch registers none of them."""

from __future__ import annotations

import ast

from . import drawn, sites, syntax

MOVES = {"to", "cuda", "cpu", "double", "float", "half", "train"}  # give the module back
FILLS = {"copy_", "fill_", "set_", "constant_", "eye_", "dirac_"}  # zeros_ and ones_ are usual for biases
PRETRAINED = {"weights", "pretrained", "checkpoint"}


def attributes(kind: type) -> dict[str, sites.Site]:
    """Attribute -> the statement of the constructor that makes the container. A constructor that writes weights itself makes fixed
    filters. One module alone in a list is hidden from `parameters()` on purpose,
    one that is passed in may have been trained elsewhere: containers of several that are constructed right there."""
    code = drawn.code_of(kind, "__init__")
    constructor = drawn.function_of(code) if code is not None else None
    if code is None or constructor is None or not constructor.args.args:
        return {}
    if fills(constructor):
        return {}
    owner = constructor.args.args[0].arg
    lines: dict[str, int] = {}
    filled: set[str] = set()
    for node in sorted((n for n in syntax.own_nodes(constructor) if isinstance(n, (ast.Assign, ast.AnnAssign, ast.Call))), key=lambda n: n.lineno):
        if isinstance(node, ast.Call):
            filled |= _appended(node, owner)
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = _name(target, owner)
            if name and node.value is not None:
                lines[name] = node.lineno
                filled.discard(name)
                if _makes(node.value) or _name(node.value, owner) in filled:
                    filled.add(name)
    return {n.removeprefix("self."): (code.co_filename, lines[n], "__init__") for n in filled if n.startswith("self.") and n in lines}


def fills(constructor: ast.FunctionDef) -> bool:
    """`conv.weight.data.copy_(taps)`, `conv.weight.data = taps`, `conv.weight = nn.Parameter(taps)`: given values, not drawn ones."""
    for node in syntax.own_nodes(constructor):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FILLS and "bias" not in ast.unparse(node):
            return True
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(n, ast.Attribute) and n.attr == "data" for t in targets for n in ast.walk(t)):
            return True
        # `head.weight = table.weight` ties two
        if any(isinstance(t, ast.Attribute) and t.attr == "weight" for t in targets) and isinstance(node.value, ast.Call):  # type: ignore[attr-defined]
            return True
    return False


def _name(node: ast.expr, owner: str) -> str:
    """ "self.experts" of an attribute of its own, "experts" of a variable."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner:
        return f"self.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _appended(call: ast.Call, owner: str) -> set[str]:
    if isinstance(call.func, ast.Attribute) and call.func.attr == "append" and call.args and _constructs(call.args[0]):
        return {_name(call.func.value, owner)} - {""}
    return set()


def _makes(value: ast.expr) -> bool:
    """A container all of whose entries are constructed in it."""
    if isinstance(value, ast.ListComp):
        return _constructs(value.elt)
    if isinstance(value, ast.DictComp):
        return _constructs(value.value)
    entries = value.elts if isinstance(value, (ast.List, ast.Tuple)) else value.values if isinstance(value, ast.Dict) else []
    return len(entries) > 1 and all(_constructs(e) for e in entries)


def _constructs(value: ast.expr) -> bool:
    """A call of a class, known by its capital: `nn.Linear(2, 3)`, `Expert(width).to(device)`. What a helper gives back may be frozen, or trained."""
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Attribute) and value.func.attr in MOVES:
        return _constructs(value.func.value)
    callee = value.func.attr if isinstance(value.func, ast.Attribute) else value.func.id if isinstance(value.func, ast.Name) else ""
    return callee[:1].isupper() and not any(k.arg in PRETRAINED for k in value.keywords)
