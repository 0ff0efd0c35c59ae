"""Where models come from: the statements that made them, which of them are in shared memory, and which are copies of such a one."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from . import digests, sites

MAX_MADE = 2000  # modules whose birth is noted, 2 us each
MAX_SHARED = 16
FULL_BYTES = 32_000_000  # up to here every bit of a model is compared (20 ms); beyond, samples of each tensor
_made: dict[int, tuple[weakref.ref[Any], sites.Site]] = {}
_shared: dict[int, weakref.ref[Any]] = {}
_serials: dict[int, tuple[weakref.ref[Any], int]] = {}
_num_serials = [0]


def note_made(module: Any) -> None:
    """The statement that makes a module, which stands outside of the constructors of the user's own classes."""
    if len(_made) < MAX_MADE:
        frame = sites.user_frame(sys._getframe(5))
        while frame is not None and frame.f_code.co_name == "__init__":
            frame = sites.user_frame(frame.f_back)
        if frame is not None:
            _made[id(module)] = (weakref.ref(module), (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))


def note_copied(module: Any) -> None:
    """copy.deepcopy and unpickling make a module without its constructor."""
    if len(_made) < MAX_MADE and (site := sites.here(5))[0]:
        _made[id(module)] = (weakref.ref(module), site)


def note_shared(thing: Any) -> None:
    """share_memory() of a module, or of a tensor, which is left out."""
    if hasattr(thing, "named_parameters") and len(_shared) < MAX_SHARED:
        _shared[id(thing)] = weakref.ref(thing)


def made_at(module: Any) -> dict[str, Any] | None:
    found = _made.get(id(module))
    return sites.as_json(found[1]) if found is not None and found[0]() is module else None


def serial(module: Any) -> int:
    """The same number for the same module, and never that of another one, as an id may be."""
    known = _serials.get(id(module))
    if known is None or known[0]() is not module:
        _num_serials[0] += 1
        known = _serials[id(module)] = (weakref.ref(module), _num_serials[0])
    return known[1]


def digest_of(module: Any) -> int:
    """Of its parameters on the CPU."""
    params = [p for p in module.parameters() if p.device.type == "cpu"]
    if sum(p.numel() * p.element_size() for p in params) > FULL_BYTES:
        return digests.of_tensors(params)[0]
    return digests.wide(b"".join(digests.full(p).to_bytes(4, "little") for p in params))


def shapes(module: Any) -> list[list[int]]:
    return sorted([list(p.shape) for p in module.parameters()])


def originals(given: list[Any]) -> list[tuple[Any, Any]]:
    """(shared model, copy of it that a child gets instead): equal to the last bit at the start, and not the same memory."""
    found: list[tuple[Any, Any]] = []
    for model in [m for ref in _shared.values() if (m := ref()) is not None and not any(m is g for g in given)]:
        copies = [g for g in given if shapes(g) == shapes(model) and digest_of(g) == digest_of(model)]
        if copies and {p.data_ptr() for p in copies[0].parameters()}.isdisjoint(p.data_ptr() for p in model.parameters()):
            found.append((model, copies[0]))
    return found
