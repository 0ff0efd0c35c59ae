"""Anomaly detection of autograd, a debugging aid, while training.

Event "anomaly" (at 20, 40, 80, ... steps with it): site (the statement that switched it on last), steps (so far with it).
"""

from __future__ import annotations

from typing import Any

from .. import sites
from ..patching import after, before
from ..state import S
from . import steps

FIRST = 20
_site: list[sites.Site] = [sites.UNKNOWN]
_entered = [-1]  # the step in which a `with detect_anomaly():` was entered last
_counted = [-1, 0]  # the last step that counted, how many did


def _after_switch(result: Any, self: Any, mode: Any = True, *args: Any, **kwargs: Any) -> None:
    """set_detect_anomaly(True) acts when it is made."""
    if mode and (site := sites.here(4))[0]:
        _site[0] = site


def _before_enter(self: Any) -> None:
    _entered[0] = S.steps
    _after_switch(None, self)


def _at_step(optimizer: Any, witness: Any, params: Any = None) -> None:
    import torch

    if _counted[0] == S.steps or not (torch.is_anomaly_enabled() or _entered[0] == S.steps):
        return
    _counted[0] = S.steps
    _counted[1] += 1
    num = _counted[1]
    if num % FIRST == 0 and num // FIRST & (num // FIRST - 1) == 0:
        S.recorder.event("anomaly", _site[0], steps=num)


def arm() -> None:
    from torch.autograd import anomaly_mode

    after(anomaly_mode.set_detect_anomaly, "__init__", _after_switch)
    before(anomaly_mode.detect_anomaly, "__enter__", _before_enter)
    steps.at_step.append(_at_step)
    steps.at_light_step.append(_at_step)
