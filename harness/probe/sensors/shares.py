"""Losses that are divided by what the ranks summed up together: a count of boxes, tokens or samples of all ranks.

Event "share" (each backward of the first 16 steps, from the first step on whose ranks summed up a few numbers before it): site, made (the
statement that made the loss), quotients (an entry each: value, same: divided by the very tensor that was all-reduced; above, below: factors
between it and the root, and close under it; mean: what is divided is a mean; None where the graph cannot be read), given (backward was
handed a gradient, or the loss has a hook), made_up (the source may scale gradients or the learning rate by the number of ranks).
Event "summed" (the first reduction of a call site): predivided (the source may divide by the number of ranks before).
"""

from __future__ import annotations

import weakref
from typing import Any

from .. import digests, makeups, quotients, sites, sources
from ..patching import contained
from ..state import S
from . import backward, metrics, steps, thrown

NUM_STEPS = 16
MAX_KEPT = 16
_summed: list[tuple[int, weakref.ref[Any], int]] = []  # step, tensor, its address
_told: set[sites.Site] = set()


@contained
def _note(tensor: Any, site: sites.Site, op: str) -> None:
    """A small tensor was reduced to its sum."""
    if S.steps >= NUM_STEPS or op != "all_reduce":
        return
    _summed.append((S.steps, weakref.ref(tensor), digests.address(tensor)))
    del _summed[:-MAX_KEPT]
    if site not in _told:
        _told.add(site)
        S.recorder.event("summed", site, predivided=makeups.predivided(sites.stack(3, 3)))


def _is_summed(tensor: Any) -> bool:
    """What is reduced in place is one tensor before and after; a view of it begins where it does, or at another of its elements."""
    for step, ref, address in _summed:
        whole = ref() if step == S.steps else None
        if whole is not None and (
            whole is tensor or (0 <= digests.address(tensor) - address < whole.numel() * whole.element_size() and tensor.dtype == whole.dtype)
        ):
            return True
    return False


@contained
def _look(loss: Any) -> None:
    if S.steps >= NUM_STEPS or not _summed or getattr(loss, "grad_fn", None) is None or (not loss.is_cpu and thrown.capturing()):
        return
    site = sites.here(4)
    found = quotients.look(loss, _is_summed)
    S.recorder.event(
        "share",
        site,
        made=sites.as_json(sources.loss_made_at(site[0], site[1]) or site),
        quotients=None if found is None else [q._asdict() for q in found],
        given=S.since.given or bool(loss._backward_hooks),
        made_up=any(makeups.made_up(file) for file in {s[0] for s in (*sites.stack(4), *steps.made_at.values())}),
    )


def arm() -> None:
    backward.at_backward.append(_look, NUM_STEPS)
    metrics.at_sum.append(_note)
