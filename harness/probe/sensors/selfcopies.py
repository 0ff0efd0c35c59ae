"""A parameter that is copied onto itself while a model is evaluated: weights that a swap kept by reference and "puts back".

Event "self_copy" (first 8): site, num (copies at that statement since the last step), moved (the weights are not those of the last step),
kept_at (the statement that kept them, as the source shows it).
Copies are looked at only from a model's eval() to the next optimizer step, and not at all once something is compiled.
"""

from __future__ import annotations

import ast
from typing import Any

from .. import copies, digests, protocol, sites, syntax
from ..arm import at_close
from ..patching import after, quiet
from ..state import S
from . import steps

MAX_TOLD = 8
MAX_WINDOWS = 64  # evaluations that are watched: a swap that is wrong is wrong each time
_open = [False]
_counts = {"windows": 0, "told": 0}
_seen: dict[sites.Site, list[Any]] = {}  # statement -> [copies, moved]


def _watch(module: Any) -> None:
    if _open[0] or S.compiling or not S.steps or _counts["windows"] >= MAX_WINDOWS:
        return
    _open[0] = True
    _counts["windows"] += 1
    copies.watch(__name__, _look)


def _look(param: Any, source: Any, site: sites.Site) -> bool:
    if type(param).__name__ == "Parameter" and _same(param, source):
        count = _seen.setdefault(site, [0, False])
        count[0] += 1
        count[1] = count[1] or _moved(param)
    return False


def _same(param: Any, source: Any) -> bool:
    return bool(param.numel() and source.data_ptr() == param.data_ptr() and source.shape == param.shape and source.stride() == param.stride())


def _moved(param: Any) -> bool:
    """Whether the parameter is another than its last step left behind."""
    if not protocol.witnessed(S.steps - 1) or param.device.type != "cpu":
        return False
    for witness in list(steps._known.values()):
        for at, own in enumerate(witness.current()):
            if own is param and at < len(witness.param_each):
                return witness.param_each[at] != digests.of_tensors([param])[1][0]
    return False


def _close(*_: Any) -> None:
    if not _open[0]:
        return
    _open[0] = False
    copies.leave(__name__)
    for site, (num, moved) in _seen.items():
        _counts["told"] += 1
        if _counts["told"] <= MAX_TOLD:
            S.recorder.event("self_copy", site, num=num, moved=moved, kept_at=sites.as_json(_kept_at(site)))
    _seen.clear()


def _kept_at(site: sites.Site) -> sites.Site:
    """The nearest statement above that lists parameters without a copy; the copy itself where there is none."""
    tree = syntax.tree(site[0])
    above = [n for n in syntax.nodes(tree) if isinstance(n, ast.Assign) and n.lineno < site[1] and _lists(n.value)] if tree else []
    return (site[0], max(n.lineno for n in above), "") if above else site


def _lists(value: ast.expr) -> bool:
    """`[p.data for p in params]`, `{n: p.detach() for n, p in ...}`, `[p for p in params]`."""
    kept = value.elt if isinstance(value, ast.ListComp) else value.value if isinstance(value, ast.DictComp) else None
    if isinstance(kept, ast.Call) and isinstance(kept.func, ast.Attribute):
        kept = kept.func.value if kept.func.attr == "detach" and not kept.args else None
    elif isinstance(kept, ast.Attribute):
        kept = kept.value if kept.attr == "data" else None
    return isinstance(kept, ast.Name) and kept is not None and "param" in ast.unparse(value)


def arm() -> None:
    import torch

    after(torch.nn.Module, "eval", lambda result, self, *a, **k: _watch(self))
    steps.at_any_step.append(_close)
    at_close.append(quiet(_close))
