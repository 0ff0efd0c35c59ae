"""Gradients that the script clips by itself while they still bear a GradScaler's factor.

Looked at, where the source has a function that writes gradients by a comparison of their norm: samples of them after the last backward and at
GradScaler.step, if nothing was unscaled in between, in the first 12 steps.
Event "scaled_clip" (once): site (the call of that function, or the write), wrote (the write), scale, shrunk (steps in which the gradients came to
less than a sixteenth), of (steps that were looked at).
"""

from __future__ import annotations

import ast
import math
from functools import cache
from typing import Any

from .. import cuts, digests, sites, sources, syntax
from ..patching import before
from ..state import S
from . import backward, collectives, precision, scales

NUM, MAX_PARAMS, LEAST, SHRUNK = 12, 16, 6, 1 / 16
BOUNDS = {"where", "clamp", "clamp_", "clamp_max", "clamp_max_", "clamp_min", "clip", "minimum", "min", "maximum", "max"}
_now: dict[int, list[float]] = {}  # id of an optimizer -> norms after the last backward
_state = {"looked": 0, "shrunk": 0, "collectives": 0}
_told = [False]


@cache
def clips(file: str) -> tuple[sites.Site, sites.Site] | None:
    """(the one call of it in this file, the write) of a function that writes gradients, takes norms and bounds or compares them."""
    tree = syntax.tree(file)
    for write in sources.gradient_writes(file) if tree is not None else ():
        assert tree is not None
        scope = syntax.function_at(tree, write[1])
        own = syntax.own_nodes(scope)
        called = {n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", "") for n in own if isinstance(n, ast.Call)}
        normed = any("norm" in name.lower() for name in called)
        bounded = bool(called & BOUNDS) or any(isinstance(n, ast.Compare) and any(isinstance(o, (ast.Gt, ast.GtE, ast.Lt, ast.LtE)) for o in n.ops) for n in own)
        name = getattr(scope, "name", "")
        calls = [n for n in syntax.nodes(tree) if isinstance(n, ast.Call) and _callee(n) == name] if name else []
        if normed and bounded and not _knows_the_scale(scope, calls):
            return ((file, calls[0].lineno, "") if len(calls) == 1 else write), write
    return None


def _knows_the_scale(scope: syntax.Function, calls: list[ast.Call]) -> bool:
    """Its bound may be multiplied by the scaler's factor: it asks for that, or is given something of this name. A `scale` that it computes itself
    is its own factor, and `scaler.scale(loss)` scales another thing."""
    own = syntax.own_nodes(scope)
    made = {n.id for n in own if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    called = {id(n.func) for n in own if isinstance(n, ast.Call)}
    read = [n for n in own if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Load) and id(n) not in called]
    named = any("scale" in (n.id if isinstance(n, ast.Name) else n.attr).lower().replace("scaler", "") and getattr(n, "id", "") not in made for n in read)
    asked = any(isinstance(n, ast.Call) and _callee(n) == "get_scale" for n in own)
    given = any("scale" in ast.unparse(a).lower() for c in calls for a in (*c.args, *(k.value for k in c.keywords)))
    return named or asked or given


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _norms(optimizer: Any) -> list[float]:
    params = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None and p.grad.is_cpu and digests.plain(p.grad)][:MAX_PARAMS]
    return [float(digests.sampled(p.grad).double().norm()) for p in params]


def _is_wanted() -> bool:
    return not _told[0] and S.steps < NUM and any(clips(f) for f in cuts.user_files()[: cuts.MAX_FILES])


def _left(loss: Any) -> None:
    if scales.scale_of(loss) <= 64 or not _is_wanted():
        return
    from .. import marks

    _state["collectives"] = S.since.num_coll
    for optimizer in marks.optimizers():
        _now[id(optimizer)] = _norms(optimizer)


def _before_scaler_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Asked before precision.py takes note of it."""
    earlier = _now.pop(id(optimizer), None)
    if not earlier or precision.is_unscaled(optimizer) or S.since.num_coll != _state["collectives"] or not _is_wanted():
        return
    later = _norms(optimizer)
    if len(later) != len(earlier) or not all(map(math.isfinite, (*earlier, *later))):
        return
    _state["looked"] += 1
    _state["shrunk"] += math.hypot(*later) < SHRUNK * math.hypot(*earlier)
    if _state["shrunk"] >= LEAST and 3 * _state["shrunk"] >= 2 * _state["looked"]:
        _told[0] = True
        at, wrote = next(found for f in cuts.user_files() if (found := clips(f)) is not None)
        S.recorder.event(
            "scaled_clip", at, wrote=sites.as_json(wrote), scale=float(scaler.get_scale()), shrunk=_state["shrunk"], of=_state["looked"]
        )


def arm() -> None:
    import torch

    _ = collectives  # armed before: it counts the calls
    backward.at_left.append(_left, NUM)
    before(torch.amp.GradScaler, "step", _before_scaler_step)
