"""States of the global CPU generators that the script's own code puts back: `torch.set_rng_state(saved)`.

Event "rng_restored" (the first 32): site, what ("torch" | "python" | "numpy"), before, state (digests of the state that was left and of the
one that is put back). torch's own code does so at every checkpointed forward: it is let through in 0.5 us.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import digests, sites
from ..arm import on_import
from ..patching import quiet, wrap
from ..state import S
from . import rng

MAX_EVENTS = 32
_told = [0]


def _torch_digest(state: Any) -> int:
    return digests.wide(bytes(state.numpy().data))


def _plain_digest(state: Any) -> int:
    return digests.wide(repr(tuple(v.tobytes() if hasattr(v, "tobytes") else v for v in state) if isinstance(state, tuple) else state).encode())


@quiet
def _note(what: str, caller: Any, now: Callable[[], Any], state: Any) -> None:
    digest = _torch_digest if what == "torch" else _plain_digest
    _told[0] += 1
    rng.tell_again()
    S.recorder.event("rng_restored", sites.of_frame(caller), what=what, before=digest(now()), state=digest(state))


def _make(what: str, now: Callable[[], Any]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def restore(*args: Any, **kwargs: Any) -> Any:
            if _told[0] < MAX_EVENTS and not S.busy and sites.is_user_code((caller := sys._getframe(1)).f_code):
                for state in (*args, *kwargs.values())[:1]:
                    _note(what, caller, now, state)
            return original(*args, **kwargs)

        return restore

    return make


def _stand_in(module: Any, name: str, what: str, now: Callable[[], Any]) -> bool:
    if not wrap(module, name, _make(what, now)):
        return False
    made = getattr(module, name)
    made.__module__, made.__qualname__ = module.__name__, name  # so that it pickles by name
    return True


def _arm_numpy(numpy: ModuleType) -> None:
    _stand_in(numpy.random, "set_state", "numpy", numpy.random.get_state)


def arm() -> None:
    import torch

    original = torch.set_rng_state
    if _stand_in(torch, "set_rng_state", "torch", torch.get_rng_state):
        rng.given_back.append((torch, "set_rng_state", original))
        rng.given_back.append((torch.random, "set_rng_state", original))
        torch.random.set_rng_state = torch.set_rng_state
    _stand_in(random, "setstate", "python", random.getstate)
    on_import("numpy", _arm_numpy)
