"""Random numbers: generator states a step, and values drawn by random functions that the user's own code calls.

Event "draw" (of the first 64 steps and of 16 behind a `set_rng_state`, one a call site, step and phase): site, fn, at (step), num (calls),
numel (of all), rows (first dimension of the last value, 0: a scalar), digest (of all values in order), whole (a floating point function),
generator (one was passed explicitly), data (inside a data loader's fetch), grad (gradients were on).
Event "seed": site, what ("torch" | "python" | "numpy"), value; the user's code seeded a global generator.
"""

from __future__ import annotations

import functools
import random
import sys
from types import ModuleType
from typing import Any
from zlib import crc32

from .. import digests, protocol, sites
from ..arm import at_close, on_import
from ..patching import after, quiet
from ..standin import stand_in
from ..state import S, mix

NUM_STEPS = 64
NUM_AGAIN = 16  # steps that are told once more behind a random state that was put back
told_until = [NUM_STEPS]
FUNCTIONS = ("randn", "rand", "randint", "randn_like", "rand_like", "randint_like", "normal", "bernoulli", "multinomial", "poisson")
METHODS = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_")
NUMPY = (
    "rand",
    "randn",
    "random",
    "normal",
    "uniform",
    "randint",
    "standard_normal",
    "binomial",
    "poisson",
    "beta",
    "choice",
    "random_sample",
)
INTEGERS = ("randint", "randint_like", "multinomial", "randrange", "choice", "poisson", "binomial")
FIRST_STEPS = 16
_last_python = [0]
num_user_draws = [0]  # so far, by the user's own code
NUM_EARLY = 32  # values of the user's first draws that go into the digest, about 50 us each
early = [0, 0, 0]  # before the first backward: draws, elements, digest of the first values; what data made at random was made of
_open: dict[tuple[Any, ...], list[Any]] = {}  # (site, fn, data, grad) -> [step, calls, numel, rows, digest, generator] not yet written


def tell_again() -> None:
    """A global generator is put into another state: what is drawn from here on may be new, or another rank's."""
    told_until[0] = max(told_until[0], S.steps + NUM_AGAIN)


def digest(step: int) -> int:
    """State of torch's CPU generator; 7 us."""
    import torch

    return digests.wide(bytes(torch.default_generator.get_state().numpy().data)) if step < told_until[0] or (step % 16 == 0 and not S.light) else 0


def python_digest(step: int) -> int:
    """States of `random` and numpy's global generator, 0 if they did not move since the last look; at the first steps, then at every 4th (100 us)."""
    if step >= told_until[0] or (step >= FIRST_STEPS and step % 4):
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
    import torch

    drawn, numel, rows = _digest(value)
    S.since.draws = mix(S.since.draws, drawn)
    grad = torch.is_grad_enabled()
    key = (site, name, S.recorder._op == b"data", grad)
    entry = _open.get(key)
    if entry is not None and entry[0] != S.steps:
        flush(S.steps)
        entry = None
    if entry is None:
        if len(_open) > 200:
            flush()
        entry = _open[key] = [S.steps, 0, 0, 0, 0, generator]
    entry[1] += 1
    entry[2] += numel
    entry[3] = rows
    entry[4] = mix(entry[4], drawn)


@quiet
def note_early(value: Any, numel: int) -> None:
    """A draw before the first backward; of a generator that is made, what it was made with."""
    early[0] += 1
    early[1] += numel
    if early[0] <= NUM_EARLY:
        early[2] = mix(early[2], _digest(value)[0])


def _digest(value: Any) -> tuple[int, int, int]:
    """(digest, elements, first dimension) of a drawn value. A device tensor is not read, which would wait: its generator's state stands
    for it."""
    if not hasattr(value, "numel"):
        shape = getattr(value, "shape", ())
        blob = value.tobytes() if hasattr(value, "tobytes") and hasattr(value, "dtype") else repr(value)[:2000].encode()
        return digests.wide(blob), int(getattr(value, "size", 1) or 1), int(shape[0]) if shape else 0
    rows, numel = (int(value.shape[0]) if value.dim() else 0), int(value.numel())
    if value.device.type == "cuda":
        import torch

        state = torch.cuda.default_generators[value.device.index or 0].get_state()
        return digests.wide(bytes(state.numpy().data)), numel, rows
    return (digests.of_tensors([value])[0] if numel else 0), numel, rows


def flush(step: int | None = None) -> None:
    """Write what was drawn before `step`; everything without it."""
    for key, (at, num, numel, rows, drawn, generator) in list(_open.items()):
        if step is None or at != step:
            del _open[key]
            site, name, data, grad = key
            S.recorder.event(
                "draw", site, fn=name, at=at, num=num, numel=numel, rows=rows, digest=drawn, whole=name.strip("_") not in INTEGERS,
                generator=generator,
                data=data, grad=grad,
            )  # fmt: skip


def is_untold(value: Any) -> bool:
    """Whether torch.jit.trace or torch.fx writes down what is asked of it, so that our questions would become part of the script's graph; torch.func's own
    tensors have no memory to read."""
    import torch as untyped

    torch: Any = untyped
    if not isinstance(value, torch.Tensor):
        return hasattr(type(value), "__torch_function__")
    return torch._C._get_tracing_state() is not None or bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def _make(name: str, source: str = "torch") -> Any:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def drawn(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            if not S.busy and (S.steps < told_until[0] or tally.on) and not S.recorder.disabled and sites.is_user_code(sys._getframe(1).f_code):
                if tally.on:
                    if source != "torch" or kwargs.get("generator") is None:
                        tally.add(source, sites.here(2))
                    if S.steps >= told_until[0]:
                        return value
                if source == "torch" and is_untold(value):
                    return value
                num_user_draws[0] += 1
                if not S.backwards:
                    note_early(value, int(value.numel()) if hasattr(value, "numel") else int(getattr(value, "size", 1) or 1))
                else:
                    _note(name, value, source == "torch" and kwargs.get("generator") is not None, sites.here(2))
            return value

        return drawn

    return make


class Tally:
    """Draws from global generators by source and call site, from the first permutation on that the script draws (permutations.py); 1 us a draw."""

    MAX_SITES = 64

    def __init__(self) -> None:
        self.on = False
        self._num: dict[tuple[str, sites.Site], int] = {}

    def add(self, source: str, site: sites.Site) -> None:
        key = (source, site)
        if key in self._num or len(self._num) < self.MAX_SITES:
            self._num[key] = self._num.get(key, 0) + 1

    def of(self, source: str) -> list[tuple[sites.Site, int]]:
        """So far, the rarest first: what every step draws is the same on all ranks."""
        return sorted(((site, num) for (name, site), num in self._num.items() if name == source), key=lambda one: one[1])


tally = Tally()
_originals: list[tuple[Any, str, Any]] = []
given_back = _originals  # what else torch.compile must find as it was


def _note_seed(what: str) -> Any:
    def note(result: Any, value: Any = None, *args: Any, **kwargs: Any) -> None:
        value = kwargs.get("seed", value)
        S.recorder.event("seed", sites.here(4), what=what, value=int(value) if hasattr(value, "__index__") else None)

    return note


def _shadow(module: Any, names: tuple[str, ...]) -> None:
    """Stand in for functions of a module that draw from its global generator; they stay what they are for everybody else's code."""
    for name in names:
        if hasattr(module, name):
            drawn = _make(name, module.__name__)(getattr(module, name))
            drawn.__module__, drawn.__qualname__ = module.__name__, name  # so that it pickles by name
            setattr(module, name, drawn)


def _arm_numpy(numpy: ModuleType) -> None:
    _shadow(numpy.random, NUMPY)
    after(numpy.random, "seed", _note_seed("numpy"))


def remember_constructors() -> None:
    """`with torch.device(...)` and set_default_device know the functions that they speak to by a set, made at first use from what torch.rand
    and the like are then: it has to hold the originals, which torch hands to it, not our stand-ins."""
    try:
        from torch.utils import _device

        _device._device_constructors()
    except (ImportError, AttributeError):  # another torch version
        S.recorder.errors += 1


def arm() -> None:
    import torch

    remember_constructors()
    for name in FUNCTIONS:
        original = getattr(torch, name)
        _originals.append((torch, name, original))
        setattr(torch, name, stand_in(original, _make(name)(original)))
    for name in METHODS:  # inherited from the C base class: shadowed on torch.Tensor, and uncovered again by disarm
        _originals.append((torch.Tensor, name, None))
        original = getattr(torch.Tensor, name)
        setattr(torch.Tensor, name, stand_in(original, _make(name)(original)))
    after(torch, "manual_seed", _note_seed("torch"))
    torch.random.manual_seed = torch.manual_seed
    _shadow(random, protocol.PYTHON_RNG)
    after(random, "seed", _note_seed("python"))
    on_import("numpy", _arm_numpy)
    at_close.append(quiet(flush))


def disarm() -> None:
    """torch.compile would break its graph at every wrapped function: give the originals back before it looks."""
    while _originals:
        owner, name, original = _originals.pop()
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
