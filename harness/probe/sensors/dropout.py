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
_seen: set[sites.Site] = set()


@quiet
def _note(name: str, caller: Any) -> None:
    import torch

    module = caller.f_locals.get("self")
    if torch.is_grad_enabled() or not isinstance(module, torch.nn.Module) or module.training or not sites.is_user_code(caller.f_code):
        return
    site = sites.of_frame(caller)
    if site not in _seen and len(_seen) < 16:
        _seen.add(site)
        S.recorder.event("dropout_always", site, function=name, module=type(module).__name__)


def _make(name: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def dropout(*args: Any, **kwargs: Any) -> Any:
            if len(args) < 3 and "training" not in kwargs and S.steps < 4096:
                _note(name, sys._getframe(2))  # the wrapper that dynamo sees through stands in between
            return original(*args, **kwargs)

        return dropout

    return make


def arm() -> None:
    import torch.nn.functional as functional

    for name in FUNCTIONS:
        traceable(functional, name, _make(name))
