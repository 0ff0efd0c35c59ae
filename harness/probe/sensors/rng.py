"""Random numbers: generator states a step, and values drawn by random functions that the user's own code calls.

Event "draw" (first 64 steps, at most 3000): site, fn, numel, digest, rows (first dimension), generator (one was passed explicitly).
"""

from __future__ import annotations

import functools
import random
import sys
from typing import Any
from zlib import crc32

from .. import digests, sites
from ..patching import quiet, wrap
from ..state import S, mix

FUNCTIONS = ("randn", "rand", "randint", "randn_like", "rand_like", "randint_like", "normal", "bernoulli", "multinomial", "poisson")
METHODS = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_")
_last_python = [0]


def digest(step: int) -> int:
    """State of torch's CPU generator; 7 us."""
    import torch

    return digests.wide(bytes(torch.default_generator.get_state().numpy().data)) if step < 64 or step % 16 == 0 else 0


def python_digest(step: int) -> int:
    """States of `random` and numpy's global generator, 0 if they did not move since the last look."""
    if step >= 64:
        return 0
    now = hash(random.getstate()[1]) & 0xFFFFFFFFFFFF
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        state = numpy.random.get_state()
        now = mix(now, crc32(bytes(state[1].data)) + int(state[2]))
    moved = now if now != _last_python[0] and _last_python[0] else 0
    _last_python[0] = now
    return moved


@quiet
def _note(name: str, value: Any, generator: bool, site: sites.Site) -> None:
    if not hasattr(value, "numel") or S.steps >= 64 or not S.backwards:
        return
    drawn = digests.of_tensors([value])[0] if value.numel() else 0
    S.since.draws = mix(S.since.draws, drawn)
    S.recorder.event("draw", site, fn=name, numel=int(value.numel()), rows=int(value.shape[0]) if value.dim() else 0, digest=drawn, generator=generator)


def _make(name: str) -> Any:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def drawn(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            if S.backwards and not S.busy and S.steps < 64 and sites.is_user_code(sys._getframe(1).f_code):
                _note(name, value, kwargs.get("generator") is not None, sites.here(2))
            return value

        return drawn

    return make


_originals: list[tuple[Any, str, Any]] = []


def arm() -> None:
    import torch

    for name in FUNCTIONS:
        _originals.append((torch, name, getattr(torch, name)))
        wrap(torch, name, _make(name))
    for name in METHODS:  # inherited from the C base class: shadowed on torch.Tensor, and uncovered again by disarm
        _originals.append((torch.Tensor, name, None))
        setattr(torch.Tensor, name, _make(name)(getattr(torch.Tensor, name)))


def disarm() -> None:
    """torch.compile would break its graph at every wrapped function: give the originals back before it looks."""
    while _originals:
        owner, name, original = _originals.pop()
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
