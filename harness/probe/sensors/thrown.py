"""Backwards whose gradients were cleared before any optimizer stepped, in the first steps: micro-batches that were computed for nothing.

Field `dropped` of an "accumulation" event: [[site of the backward, how often since the last step, of these inside no_sync(), site of the
clearing]]. Counted where the next backward comes from the same statement, no optimizer stepped in between, every optimizer's gradients are
gone, and the parameters are as they were (the first pass of SAM moves them).
"""

from __future__ import annotations

from typing import Any

from .. import digests, marks, sites, zeroing
from ..patching import after
from ..state import S

NUM_STEPS = 16
_given: list[Any] = []  # of the last backward: site, steps so far, inside no_sync(), digest of some parameters
_cleared_at: list[sites.Site] = []
_dropped: dict[sites.Site, list[Any]] = {}


def _has_gradients() -> bool:
    """Whether a gradient of any optimizer is there and not zero. One on a device counts where it is there: its value would be waited for."""
    for optimizer in marks.optimizers():
        for p in zeroing.spread([p for group in optimizer.param_groups for p in group["params"] if p.grad is not None], zeroing.LOOKED_AT):
            if not digests.plain(p.grad) or p.grad.device.type != "cpu" or digests.any_sampled(p.grad):
                return True
    return False


def _weights() -> int:
    some = [p for optimizer in marks.optimizers() for p in zeroing.spread([p for g in optimizer.param_groups for p in g["params"]], zeroing.LOOKED_AT)]
    return digests.of_tensors(some[:32])[0]


def capturing() -> bool:
    """A CUDA graph is being captured: reading a tensor would break it."""
    import torch as untyped

    torch: Any = untyped
    return bool(torch.cuda.is_initialized()) and bool(torch.cuda.is_current_stream_capturing())


def note_backward(site: sites.Site) -> None:
    """After a backward of the first steps."""
    if capturing():
        _given.clear()
        return
    _given[:] = [site, S.steps, S.since.last_no_sync, _weights()] if _has_gradients() else []
    _cleared_at.clear()


def look(site: sites.Site) -> None:
    """Before the next one."""
    if not _given or _given[:2] != [site, S.steps] or capturing() or _has_gradients() or _weights() != _given[3]:
        return
    entry = _dropped.setdefault(site, [0, 0, sites.UNKNOWN])
    entry[0] += 1
    entry[1] += bool(_given[2])
    entry[2] = _cleared_at[-1] if _cleared_at else entry[2]


def take() -> list[Any]:
    """What was dropped since the last step, for its event."""
    told = [[sites.as_json(site), num, no_sync, sites.as_json(at)] for site, (num, no_sync, at) in list(_dropped.items())[:4]]
    _dropped.clear()
    return told


def note_cleared(*args: Any, **kwargs: Any) -> None:
    """After a zero_grad(); of an optimizer backward.py tells."""
    if S.steps < NUM_STEPS and _given and not _cleared_at:
        _cleared_at.append(sites.here(4))


def arm() -> None:
    import torch

    after(torch.nn.Module, "zero_grad", note_cleared)
