"""SYN104 unfrozen-after-wrap: parameters were unfrozen after the model was wrapped

What it does
    Compares the parameters of a wrapped model with those that DDP saw in its constructor, at each of the first 64 steps and every
    16th after.

Why it is bad
    requires_grad was False when DDP was constructed, so DDP has no hook on these parameters: they are trained on each rank's own
    gradient.

Wrong
    model = DDP(net)                    # net.backbone is frozen here
    for p in net.backbone.parameters(): p.requires_grad_(True)

Right
    for p in net.backbone.parameters(): p.requires_grad_(True)
    model = DDP(net)                    # wrap again after unfreezing

Known limits
    Parameters that DDP was told to ignore, and models whose gradients are averaged by hand, are silent: the finding needs
    gradients that differ, or torch's own failure.
"""

from __future__ import annotations

from typing import ClassVar

from harness.checks.syn.changed import ChangedAfterWrap


class UnfrozenAfterWrap(ChangedAfterWrap):
    code = "SYN104"
    name = "unfrozen-after-wrap"
    were: ClassVar[dict[str, str]] = {"unfrozen": "unfrozen after the model was wrapped: DDP does not average them"}
