"""`F.dropout(x, p)` without `training=`: its default is True, so it stays on when the model is in eval mode.

Event "dropout_always" (once a call site): site, function, module (class whose method calls it, while it is in eval mode and gradients are
off). nn.Dropout passes its own flag and is let through in 0.3 us; a call that says `training=True` means it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .. import sites
from ..patching import quiet
from ..seethrough import traceable
from ..state import S

FUNCTIONS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
MAX_SITES = 16
_seen: set[sites.Site] = set()


@quiet
def _note(name: str, caller: Any) -> None:
    import torch

    if torch.is_grad_enabled() or not sites.is_user_code(caller.f_code) or (site := sites.of_frame(caller)) in _seen or len(_seen) >= MAX_SITES:
        return
    module = caller.f_locals.get("self")  # last, and hardly more than once a call site: it copies the frame's locals, and the copy keeps what they hold
    is_module = isinstance(module, torch.nn.Module)
    if is_module and module.training:
        return
    _seen.add(site)
    if is_module:
        S.recorder.event("dropout_always", site, function=name, module=type(module).__name__)


def _make(name: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def dropout(*args: Any, **kwargs: Any) -> Any:
            if len(args) < 3 and "training" not in kwargs:
                _note(name, sys._getframe(2))  # the wrapper that dynamo sees through stands in between
            return original(*args, **kwargs)

        return dropout

    return make


def arm() -> None:
    import torch.nn.functional as functional

    for name in FUNCTIONS:
        traceable(functional, name, _make(name))
