"""Whether gradients were zero before a backward, and whether it added to some that were not: the look of a few of each optimizer's."""

from __future__ import annotations

import weakref
from typing import Any

from . import digests, marks

LOOKED_AT = 8  # gradients, spread over the optimizer: a part that is never zeroed counts


def spread(items: list[Any], num: int) -> list[Any]:
    """At most `num` of them, evenly spaced, the last one among them."""
    return items if len(items) <= num else [items[(i + 1) * len(items) // num - 1] for i in range(num)]


def check() -> None:
    """Whether each optimizer's gradients are zero or None now; remembered until its step."""
    for optimizer in marks.optimizers():
        m = marks.of(optimizer)
        if m.cleared:
            m.zeroed, m.held = True, []
        elif not m.zeroed:
            versions = m.versions
            nonzero = False
            m.held = []
            for p in spread([p for group in optimizer.param_groups for p in group["params"] if p.grad is not None], LOOKED_AT):
                # on a device its value would wait for it: what nobody has written to since the last step or backward is as it was
                if (
                    versions.get(id(p), p.grad._version) == p.grad._version
                    if p.grad.device.type != "cpu"
                    else digests.plain(grad := digests.local(p.grad)) and digests.any_sampled(grad)
                ):
                    nonzero = True
                    m.held.append((weakref.ref(p), id(p.grad), p.grad._version))
            m.zeroed = not nonzero


def note_versions(optimizer: Any, m: marks.Mark) -> None:
    if m.on_device:
        m.versions = {id(p): p.grad._version for g in optimizer.param_groups for p in g["params"] if p.grad is not None}


def on_device(optimizer: Any) -> bool:
    for group in optimizer.param_groups:
        params = group["params"]
        if params and not params[0].is_cpu:
            return True
    return False


def has_added(m: marks.Mark) -> bool:
    """Whether this backward added to a gradient that was not zero; one that the script writes itself no backward touches."""
    held, m.held = m.held, []
    grads = [(p.grad, was, version) for ref, was, version in held if (p := ref()) is not None]
    return any(g is not None and (id(g) != was or g._version != version) for g, was, version in grads)
