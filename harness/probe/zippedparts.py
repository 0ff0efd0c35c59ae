"""Whether lists gathered from the ranks are put together by `zip(*parts)`, which ends with the shortest of them."""

from __future__ import annotations

import ast

from . import sites, syntax

OUTPUTS = {"all_gather_object": (0, "object_list"), "gather_object": (1, "object_gather_list")}


def zipped_after(site: sites.Site, op: str, strict: bool = False) -> sites.Site | None:
    """The `zip(*parts)` behind the gather, in the same function, where nothing else reads the parts: no tail is kept. `strict`: the one that
    refuses lists of different length instead."""
    tree = syntax.tree(site[0]) if op in OUTPUTS else None
    if tree is None:
        return None
    own = syntax.own_nodes(syntax.function_at(tree, site[1]))
    position, keyword = OUTPUTS[op]
    gathers = [n for n in own if isinstance(n, ast.Call) and syntax.spans(n, site[1]) and _callee(n) == op]
    if len(gathers) != 1:
        return None
    call = gathers[0]
    given = next((k.value for k in call.keywords if k.arg == keyword), call.args[position] if len(call.args) > position else None)
    if not isinstance(given, ast.Name) or any(_keeps_tail(n, call) for n in own):
        return None
    reads = [n for n in own if isinstance(n, ast.Name) and n.id == given.id and n.lineno > (call.end_lineno or call.lineno)]
    zips = [n for n in own if isinstance(n, ast.Call) and _callee(n) == "zip" and len(n.args) == 1 and _is_strict(n) == strict]
    found = [z for z in zips if isinstance(z.args[0], ast.Starred) and z.args[0].value in reads]
    return (site[0], found[0].lineno, site[2]) if len(found) == len(reads) == 1 else None


def _keeps_tail(node: ast.AST, gather: ast.Call) -> bool:
    """What this rank gave is cut behind the gather, `queue[len(rounds):]`: what fills no round waits for the next one."""
    names = {a.id for a in (*gather.args, *(k.value for k in gather.keywords)) if isinstance(a, ast.Name)}
    sliced = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and isinstance(node.value, ast.Name)
    return sliced and node.value.id in names and node.lineno >= gather.lineno  # type: ignore[attr-defined]


def _is_strict(call: ast.Call) -> bool | None:
    """None: only the run knows."""
    if not call.keywords:
        return False
    value = call.keywords[0].value
    return True if isinstance(value, ast.Constant) and value.value is True else None


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
