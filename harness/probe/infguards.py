"""Whether the script may see to it by itself that all ranks agree on gradients that are not finite, as its source shows it (in doubt yes).

What runs in one turn of the loop around a statement may decide for all ranks where it asks for inf or nan and speaks of gradients or norms; so may
code that knows where a GradScaler keeps what it found.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from . import cuts, origins, sites, syntax, valuesources

ASKS = {"isfinite", "isinf", "isnan", "nan_to_num", "nan_to_num_"}
OF_NO_VALUE = {"torch", "math", "np", "numpy", "item", "detach"}
SCALERS_OWN = ("found_inf", "inf_per_device")
MAX_HOPS = 3
_known: dict[tuple[sites.Site, ...], bool] = {}


def any_guard(stack: Sequence[sites.Site]) -> bool:
    """`stack`: the user's frames at the statement, innermost first."""
    key = tuple(stack)
    if key not in _known:
        files = cuts.user_files()
        unclear = not stack or not files or len(files) > cuts.MAX_FILES or any(syntax.tree(f) is None for f in (*files, *(s[0] for s in stack)))
        _known[key] = unclear or any(cuts.any_text(text) for text in SCALERS_OWN) or any(_asks(scope) for scope in _turn(stack, files))
    return _known[key]


def _turn(stack: Sequence[sites.Site], files: Sequence[str]) -> list[ast.AST]:
    """The frames' functions up to the first loop around one of them, of that its body, and what these call by name."""
    found: list[ast.AST] = []
    for file, line, _ in stack:
        tree = syntax.tree(file)
        assert tree is not None
        around = origins.loops_around(tree, line)
        found.append(around[0] if around else syntax.function_at(tree, line))
        if around:
            break
    for _ in range(MAX_HOPS):
        called = {valuesources.callee(n) for scope in found for n in syntax.nodes(scope) if isinstance(n, ast.Call)}
        defined = [f for name in files for f in syntax.functions(syntax.tree(name) or ast.Module([], [])) if f.name in called]
        found.extend(f for f in defined if f not in found)
    return found


def _asks(scope: ast.AST) -> bool:
    nodes = syntax.nodes(scope)
    of_losses = {id(n.func) for n in nodes if isinstance(n, ast.Call) and _of_losses(n)}
    names = {_name(n) for n in nodes if isinstance(n, (ast.Attribute, ast.Name)) and id(n) not in of_losses}
    return bool(names & ASKS) and any("grad" in name.lower() or "norm" in name.lower() for name in names)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _of_losses(call: ast.Call) -> bool:
    """`torch.isfinite(loss)`: a loss that is finite may have gradients that are not."""
    parts = [*call.args, *([call.func.value] if isinstance(call.func, ast.Attribute) else [])]
    words = {_name(n) for part in parts for n in syntax.nodes(part)} - {"", *OF_NO_VALUE}
    return valuesources.callee(call) in ASKS and bool(words) and all("loss" in word.lower() for word in words)
