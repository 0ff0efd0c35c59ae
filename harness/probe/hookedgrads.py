"""What a parameter's gradient was before the script's hooks on it reduced it over the ranks: a few values, of the first steps.

A step of several backwards is left out: what its hooks are given has in part been reduced before.
"""

from __future__ import annotations

from typing import Any

from . import digests, marks, samplevalues
from .state import S

NUM_STEPS = 6
_own: dict[int, Any] = {}  # id of a parameter -> a few values, a copy
_wanted: list[Any] = [-1, set()]  # the step it was made at, ids of the parameters that are sampled


def note(param: Any, grad: Any) -> None:
    """Before the first hook of a parameter."""
    if S.steps >= NUM_STEPS or grad is None or not digests.plain(grad):
        return
    if _wanted[0] != S.steps:
        _own.clear()
        _wanted[:] = [S.steps, {id(p) for o in marks.optimizers() for p in _params(o)[: samplevalues.MAX_TENSORS]}]
    if id(param) in _wanted[1] and id(param) not in _own:
        _own[id(param)] = digests.sampled(grad.detach(), samplevalues.NUM_GRADIENT).clone()


def take(optimizer: Any) -> dict[str, list[float]]:
    """By position in the optimizer, as samplevalues.py tells; read once, at the step."""
    found = {str(i): _own.pop(id(p)) for i, p in enumerate(_params(optimizer)) if id(p) in _own} if _own else {}
    return {k: [float(v) for v in sample.tolist()] for k, sample in found.items()} if S.since.num_backward == 1 else {}


def _params(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]
