"""SYN106 parameter-rebound-after-wrap: parameters were replaced by new Parameter objects after the model was wrapped

What it does
    Compares the parameters of a wrapped model with those that DDP saw in its constructor, at each of the first 64 steps and every
    16th after.

Why it is bad
    A new Parameter has no hook. DDP waits for the old one and fails a step late with a message that names neither, or the new one
    trains alone.

Wrong
    model = DDP(net)
    net.out.weight = nn.Parameter(w)

Right
    with torch.no_grad(): net.out.weight.copy_(w)     # in place, or rebind before wrapping

Known limits
    Parameters that DDP was told to ignore, and models whose gradients are averaged by hand, are silent: the finding needs
    gradients that differ, or torch's own failure.
"""

from __future__ import annotations

from typing import ClassVar

from harness.checks.syn.changed import ChangedAfterWrap


class ParameterReboundAfterWrap(ChangedAfterWrap):
    code = "SYN106"
    name = "parameter-rebound-after-wrap"
    were: ClassVar[dict[str, str]] = {
        "rebound": "replaced by new Parameter objects after the model was wrapped: DDP does not average them",
        "tied": "replaced by parameters of other layers after the model was wrapped: DDP waits for the old ones",
        "removed": "taken out of the model after it was wrapped: DDP waits for them",
    }
