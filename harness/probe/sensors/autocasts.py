"""For which kinds of device the script asks for autocast, and on which its trained parameters lie.

Event "autocast_elsewhere" (once, before the third step): site (the statement that asks), asked (device types, each with `enabled` true), on (those
of the parameters), half (float16 is what all of them compute in). Only where autocast was asked for in this step or the one before, and for none
of the devices that parameters lie on.
"""

from __future__ import annotations

from typing import Any

from .. import sites
from ..patching import before
from ..state import S
from . import steps

LOOKED_AT, MAX_ASKED = 2, 8
_asked: dict[str, tuple[int, sites.Site, bool]] = {}  # device type -> step of the last time, statement, whether in float16
_told = [False]


def _before_init(self: Any, device_type: Any = None, dtype: Any = None, enabled: Any = True, *args: Any, **kwargs: Any) -> None:
    if not _told[0] and enabled and isinstance(device_type, str) and len(_asked) < MAX_ASKED:
        half = str(dtype) == "torch.float16" or (dtype is None and device_type == "cuda")
        _asked[device_type] = (S.steps, sites.here(4), half)


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if _told[0] or S.steps < LOOKED_AT:
        return
    _told[0] = True
    on = sorted({p.device.type for p in params if p is not None})
    recent = {kind: (site, half) for kind, (step, site, half) in _asked.items() if step >= S.steps - 1 and site[0]}
    if recent and on and recent.keys().isdisjoint(on):
        site, _ = next(iter(recent.values()))
        S.recorder.event("autocast_elsewhere", site, asked=sorted(recent), on=on, half=all(half for _, half in recent.values()))


def arm() -> None:
    import torch

    before(torch.amp.autocast_mode.autocast, "__init__", _before_init)
    steps.at_step.append(_at_step, LOOKED_AT + 8)
