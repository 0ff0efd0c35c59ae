"""Layers of a trained model that go to eval mode because another module that holds them does: `copy.copy(net).eval()`.

Event "shared_eval" (once a module): site (of that eval()), module, layers (names in the trained model of the Dropout and BatchNorm layers that are
in eval mode since), steps (taken so, one after the other), whole (it holds all parameters
of the trained model). Told where the other module was called without gradients behind its eval(), has
parameters that an optimizer trains, and the layers were in train mode at the step before it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from .. import names, sites
from ..state import S
from . import layers, modes, steps

MAX_OTHERS, ENOUGH = 16, 4


@dataclass
class Other:
    """A module outside of the trained models that shares layers with one of them."""

    module: weakref.ref[Any]
    kind: str
    site: sites.Site
    shared: dict[str, weakref.ref[Any]]
    whole: bool
    evaluated: bool = False
    steps: int = 0
    told: bool = False


_others: list[Other] = []


def note_switch(module: Any, mode: bool, site: sites.Site) -> None:
    """Before train() or eval() of this module, called by the script."""
    if mode or not S.steps or len(_others) >= MAX_OTHERS or S.compiling:
        return
    shared = _shared(module)
    if shared:
        own = {id(p) for p in module.parameters()}
        whole = any({id(p) for p in root.parameters()} <= own for root in layers.roots())
        _others.append(Other(weakref.ref(module), type(module).__name__, site, {n: weakref.ref(m) for n, m in shared.items()}, whole))


def _shared(module: Any) -> dict[str, Any]:
    """The layers in train mode that it shares with a trained model in train mode, of which it is no part."""
    own = {id(m) for m in module.modules()}
    for root in layers.roots():
        inside = {id(m) for m in root.modules()}
        if id(module) in inside or not own & inside or not root.training or id(root) in own:
            continue
        dropout, norms = layers.count(root)
        wanted = {id(m) for m in (*dropout, *norms)} & own
        if wanted and _is_trained(module):
            return {names.clean(n): m for n, m in root.named_modules() if id(m) in wanted}
    return {}


def _is_trained(module: Any) -> bool:
    held = {i for w in list(steps._known.values()) for i in w.ids}
    return any(p.requires_grad and id(p) in held for p in module.parameters())


def _at_eval_forward(module: Any) -> None:
    import torch

    if _others and not torch.is_grad_enabled():
        for other in _others:
            other.evaluated = other.evaluated or other.module() is module


def _at_step(optimizer: Any, witness: Any, *args: Any) -> None:
    for other in _others:
        if other.told or not other.evaluated:
            continue
        still = [n for n, ref in other.shared.items() if (m := ref()) is not None and not m.training]
        other.steps = other.steps + 1 if still and all(r.training for ref in witness.roots if (r := ref()) is not None) else 0
        if other.steps >= ENOUGH:
            other.told = True
            S.recorder.event("shared_eval", other.site, module=other.kind, layers=still[:20], steps=other.steps, whole=other.whole)


def arm() -> None:
    modes.at_switch.append(note_switch)
    modes.at_eval_forward.append(_at_eval_forward)
    steps.at_step.append(_at_step, when=_others)
    steps.at_light_step.append(_at_step)
