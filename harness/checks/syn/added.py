"""SYN105 module-added-after-wrap: parameters were added after the model was wrapped

What it does
    Compares the parameters of a wrapped model with those that DDP saw in its constructor, at each of the first 64 steps and every
    16th after.

Why it is bad
    DDP neither broadcasts nor averages what it did not see when it was constructed: the new layer starts and drifts differently
    on every rank.

Wrong
    model = DDP(net)
    net.head = nn.Linear(64, 10)

Right
    net.head = nn.Linear(64, 10)
    model = DDP(net)

Known limits
    Parameters that DDP was told to ignore, and models whose gradients are averaged by hand, are silent: the finding needs
    gradients that differ, or torch's own failure.
"""

from __future__ import annotations

from typing import ClassVar

from harness.checks.syn.changed import ChangedAfterWrap


class ModuleAddedAfterWrap(ChangedAfterWrap):
    code = "SYN105"
    name = "module-added-after-wrap"
    were: ClassVar[dict[str, str]] = {"added": "added after the model was wrapped: DDP does not average them"}
