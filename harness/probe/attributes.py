"""A tensor that a module keeps as a plain attribute: `.to()` moves and casts parameters and buffers only, and the first forward fails.

Read from the frames of a traceback, which are over: reading their locals changes nothing.
"""

from __future__ import annotations

import ast
import re
import sys
from types import TracebackType
from typing import Any

from . import sites, syntax

MISMATCH = re.compile(
    r"same d(type|evice)|scalar type|two devices|should be the same|indices should be either on|must (match|have the same) d?type"
    r"|is on (cpu|cuda)",
    re.IGNORECASE,
)


def left_behind(message: str, tb: TracebackType | None) -> dict[str, Any] | None:
    """name, module, has [dtype, device], wants [dtype, device], set_at: the one such tensor that the failing function names; None if there is
    none, or several."""
    torch = sys.modules.get("torch")
    if torch is None or not MISMATCH.search(message):
        return None
    frames = []
    while tb is not None:
        frames.append(tb.tb_frame)
        tb = tb.tb_next
    for frame in reversed(frames):
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and sites.is_user_file(frame.f_code.co_filename):
            found = _of(owner, set(frame.f_code.co_names), torch)
            return {**found, "set_at": sites.as_json(_set_at(frame.f_code.co_filename, type(owner).__name__, found["name"]))} if found else None
    return None


def _of(owner: Any, names: set[str], torch: Any) -> dict[str, Any] | None:
    held = next(owner.parameters(), None)
    if held is None:
        return None
    own = {k: v[0] if isinstance(v, (list, tuple)) and v else v for k, v in vars(owner).items() if k in names}
    plain = {k: v for k, v in own.items() if isinstance(v, torch.Tensor) and _parts(v, held)}
    if len(plain) != 1:
        return None
    name, tensor = next(iter(plain.items()))
    shown = [str(tensor.dtype).removeprefix("torch."), str(tensor.device)], [str(held.dtype).removeprefix("torch."), str(held.device)]
    return {"name": name, "module": type(owner).__name__, "has": shown[0], "wants": shown[1]}


def _parts(tensor: Any, held: Any) -> bool:
    """On another device than the parameters, or of another floating type: indices and masks need not be cast."""
    floats = tensor.is_floating_point() and held.is_floating_point()
    return bool(tensor.device != held.device or (floats and tensor.dtype != held.dtype))


def _set_at(file: str, owner: str, name: str) -> sites.Site:
    """The first assignment to self.NAME in the class; else in the file."""
    tree = syntax.tree(file)
    if tree is None:
        return sites.UNKNOWN
    classes = [n for n in syntax.nodes(tree) if isinstance(n, ast.ClassDef) and n.name == owner]
    for scope in (*classes, tree):
        for node in syntax.nodes(scope):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            if any(isinstance(t, ast.Attribute) and t.attr == name and isinstance(t.value, ast.Name) and t.value.id == "self" for t in targets):
                return file, node.lineno, "__init__"  # type: ignore[attr-defined]
    return sites.UNKNOWN
