"""Squared norms of the gradients that the script sums over the ranks, and the norm that the gradients have at the step after it.

Event "grad_square" (first 12 such steps; 16 sums are looked at in all): site (the all_reduce), got (the sum), own (the square of all gradients that
this rank's optimizers would step with), left (the same at the step). Only where the sum is a whole number of times what this rank has, twice and
more: then each rank gave all of it.
"""

from __future__ import annotations

from typing import Any

from .. import digests, marks, sites
from ..patching import contained
from ..state import S
from . import metrics, steps

MAX_LOOKS, MAX_MISSES, MAX_TOLD = 16, 2, 12
MAX_NUMEL = 50_000_000  # of all gradients: 20 ms on one core, and no copy that fills a device
ROUNDING = 1e-3  # torch's float32 sum of millions of squares against ours in float64
_looks, _told = [0], [0]
_misses: dict[sites.Site, int] = {}
_pending: list[tuple[int, sites.Site, float, float]] = []  # step, where, sum, own square


def square() -> float:
    """Of all gradients that optimizers hold, 0 where there are none or too many; on a device it waits, at few steps."""
    import torch

    seen: dict[int, Any] = {id(p): p.grad for o in marks.optimizers() for g in o.param_groups for p in g["params"] if p.grad is not None}
    if not seen or not all(digests.plain(g) for g in seen.values()) or sum(g.numel() for g in seen.values()) > MAX_NUMEL:
        return 0.0
    return sum(float(torch.linalg.vector_norm(g.detach(), dtype=torch.float64)) ** 2 for g in seen.values())


@contained
def _note(tensor: Any, site: sites.Site, op: str) -> None:
    if op != "all_reduce" or tensor.numel() != 1 or not tensor.is_floating_point() or tensor.requires_grad:
        return
    if not S.backwards or _looks[0] >= MAX_LOOKS or _misses.get(site, 0) >= MAX_MISSES:
        return
    _looks[0] += 1
    own, got = square(), float(tensor.detach())
    times = got / own if own > 0 else 0.0
    if times > 1.5 and abs(times - round(times)) <= ROUNDING * times:
        _pending[:] = [(S.steps, site, got, own)]
    else:
        _misses[site] = _misses.get(site, 0) + 1


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    pending, _pending[:] = list(_pending), []
    if not pending or pending[0][0] != S.steps or _told[0] >= MAX_TOLD:
        return
    _told[0] += 1
    _, site, got, own = pending[0]
    S.recorder.event("grad_square", site, got=got, own=own, left=square())


def arm() -> None:
    metrics.at_sum.append(_note)
    steps.at_step.append(_at_step, when=_pending)
