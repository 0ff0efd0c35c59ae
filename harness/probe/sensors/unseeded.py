"""numpy generators that the script makes without a seed and draws from while it trains.

Event "unseeded" (after step 10, or at the end; first 8 generators): site (the statement that made it), moved (its state changed between steps 2
and 10), deterministic (torch.use_deterministic_algorithms is on). numpy's generators take no weak reference: they are held until then.
What loader workers draw from their copies is not seen.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from .. import sites
from ..arm import at_close, on_import
from ..patching import quiet, wrap
from ..state import S
from . import rng, steps

FROM_STEP, TO_STEP, MAX = 2, 10, 8
MAY_DRAW = 1 << 40  # its draws are not seen: as many as anyone could need
_made: list[list[Any]] = []  # generator, site, state at FROM_STEP
_num = [0]


def _make(original: Any) -> Any:
    note = quiet(_note)

    def default_rng(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if not S.backwards and sites.is_user_code(sys._getframe(1).f_code):
            rng.note_early(args or kwargs or os.getpid(), MAY_DRAW)
        if (args[0] if args else kwargs.get("seed")) is None and _num[0] < MAX and sites.is_user_code(sys._getframe(1).f_code):
            note(made, sites.here(2))
        return made

    return default_rng


def _note(made: Any, site: sites.Site) -> None:
    if S.steps < TO_STEP:
        _num[0] += 1
        _made.append([made, site, None])


def _state(made: Any) -> str:
    return repr(made.bit_generator.state)


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if not _made:
        return
    if S.steps >= TO_STEP:
        tell()
    elif S.steps >= FROM_STEP:
        for one in _made:
            one[2] = one[2] or _state(one[0])


def tell() -> None:
    import torch

    while _made:
        made, site, state = _made.pop()
        moved = state is not None and _state(made) != state
        S.recorder.event("unseeded", site, moved=moved, deterministic=bool(torch.are_deterministic_algorithms_enabled()))


def _arm(numpy: ModuleType) -> None:
    wrap(numpy.random, "default_rng", _make)


def arm() -> None:
    on_import("numpy", _arm)
    steps.at_step.append(_at_step, when=_made)
    at_close.append(quiet(tell))
