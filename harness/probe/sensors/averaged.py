"""Averages of the weights (EMA, teachers, targets): how often they move while the weights that they follow stand still.

Looked at are models that no optimizer holds, whose parameters have the shapes of a trained model's and want no gradient; before the first 256
backwards, by samples of their first parameters. A window lies between two optimizer steps.
Event "average_idle" (once a model, after 6 windows in which it moved several times, towards weights that stood still): site (the call that updates it, where
the source shows one), module, made (the statement that made it), windows, moves, idle (those of the last window), backwards (in it).
"""

from __future__ import annotations

import ast
import math
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import digests, lineage, names, sites, syntax
from ..patching import contained
from ..state import S
from . import backward, steps

MAX_AVERAGES, MAX_LOOKS, MAX_FINDS, ENOUGH, SAMPLED = 4, 256, 12, 6, 2
UPDATES = re.compile(r"(?<![a-z])(ema|swa|shadow|teacher|target|average|averaged|momentum_encoder)", re.IGNORECASE)
_averages: list[Average] = []
_known = [0]  # modules made when the averages were looked for last
_finds = [0]


@dataclass
class Average:
    """One such model, and the weights that it follows."""

    model: weakref.ref[Any]
    live: list[weakref.ref[Any]]
    values: list[float] = field(default_factory=list)
    step: int = -1  # of the window
    moves: int = 0  # in this window
    idle: int = 0  # of them towards weights that stood still
    backwards: int = 0
    windows: int = 0  # with such moves
    other: int = 0  # without
    told: bool = False
    ever: bool = False  # it has moved


def has_moved(model: Any) -> bool:
    """Whether it is such an average, and was seen to move while the weights were trained."""
    return any(one.ever and one.model() is model for one in _averages)


def _sampled(params: Sequence[Any]) -> list[float]:
    return [v for p in params for v in digests.sampled(p.detach()).tolist()]


def _find() -> None:
    """New ones: the parameters of none of them are in an optimizer that has stepped."""
    _known[0] = names.num_made[0]
    held = {i for w in list(steps._known.values()) for i in w.ids}
    roots = [r for w in list(steps._known.values()) for ref in w.roots if (r := ref()) is not None]
    for model in names.root_modules()[:64] if roots else ():
        params = list(model.parameters())
        if len(_averages) >= MAX_AVERAGES or not params or any(p.requires_grad or id(p) in held for p in params):
            continue
        if any(not p.is_cpu or not digests.plain(p) or not p.is_floating_point() for p in params) or any(a.model() is model for a in _averages):
            continue
        shapes = [p.shape for p in params]
        live = next((own for own in (list(root.parameters()) for root in roots) if [p.shape for p in own] == shapes), None)
        if live is not None:
            _averages.append(Average(weakref.ref(model), [weakref.ref(p) for p in live[:SAMPLED]]))


@contained
def _at_backward(loss: Any) -> None:
    if not S.steps or S.backwards >= MAX_LOOKS:
        return
    if names.num_made[0] != _known[0] and _finds[0] < MAX_FINDS:  # a loss function that is made in every step is a module as well
        _finds[0] += 1
        _find()
    for one in _averages:
        model, live = one.model(), [p for ref in one.live if (p := ref()) is not None]
        if model is not None and not one.told and len(live) == len(one.live):
            _look(one, _sampled(list(model.parameters())[: len(live)]), live)


def _look(one: Average, values: list[float], live: list[Any]) -> None:
    before, one.values = one.values, values
    moved = bool(before) and len(before) == len(values) and before != values
    one.moves += moved
    one.ever = one.ever or moved
    one.backwards += 1
    if S.steps == one.step:  # the weights have not moved since the last backward
        now = _sampled(live)  # fewer where FSDP has given memory back
        one.idle += moved and len(now) == len(values) and approaches(before, values, now)
        return
    if one.step >= 0:
        outrun = one.idle > 0 and one.moves > 1  # moved once, between two micro-batches, it keeps pace
        one.windows += outrun
        one.other += not outrun
    if one.windows >= ENOUGH and one.windows > 4 * one.other:
        _tell(one)
    one.step, one.moves, one.idle, one.backwards = S.steps, 0, 0, 0


def approaches(before: Sequence[float], after: Sequence[float], live: Sequence[float]) -> bool:
    """Whether all of it came nearer to the weights by one factor, as an average with a decay does."""
    first, second = ([v - w for v, w in zip(values, live, strict=True)] for values in (before, after))
    size = sum(d * d for d in first)
    factor = sum(a * b for a, b in zip(first, second, strict=True)) / size if size else 1.0
    rest = math.sqrt(sum((b - factor * a) ** 2 for a, b in zip(first, second, strict=True)))
    rounding = 1e-6 * math.sqrt(sum(w * w for w in live))
    return 0.0 <= factor < 1.0 and rest <= 0.05 * (1.0 - factor) * math.sqrt(size) + rounding


def _tell(one: Average) -> None:
    one.told = True
    model = one.model()
    site = S.loss_site or sites.UNKNOWN
    S.recorder.event(
        "average_idle", updated_at(site) or site, module=type(model).__name__, made=lineage.made_at(model), windows=one.windows, moves=one.moves,
        idle=one.idle, backwards=one.backwards,
    )  # fmt: skip


def updated_at(site: sites.Site) -> sites.Site | None:
    """The one call behind a backward, in its function, that names such an average: `ema.update(...)`, `update_teacher(...)`."""
    tree = syntax.tree(site[0]) if site[0] else None
    own = syntax.own_nodes(syntax.function_at(tree, site[1])) if tree is not None else ()
    calls = [n.value for n in own if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) and n.lineno > site[1]]
    lines = {n.lineno for n in calls if UPDATES.search(ast.unparse(n.func).replace("_", " "))}
    return (site[0], lines.pop(), site[2]) if len(lines) == 1 else None


def arm() -> None:
    backward.at_backward.append(_at_backward)
