"""Permutations that the script draws itself, which ranks cut their shares from: torch.randperm, random.shuffle, numpy's permutation and shuffle.

Event "permuted" (first 48 calls of a site, 12 sites): site, fn, num (elements), digest (of samples of it), generator (one was passed, or the draw is
not from a global generator), cut (the statement that takes a part of it, where the source tells), drawn [[site, draws]] (so far, of the script's own
draws from the same global generator, since the first such event).
"""

from __future__ import annotations

import ast
import random
import sys
from types import ModuleType
from typing import Any

from .. import digests, sites, syntax
from ..arm import on_import
from ..patching import quiet
from ..standin import stand_in
from ..state import S
from . import rng

MAX_CALLS, MAX_SITES, MAX_DRAWN = 48, 12, 24
SOURCES = {"randperm": "torch", "random.shuffle": "random", "permutation": "numpy.random", "shuffle": "numpy.random"}
SAMPLED = 64  # elements of a list
_calls: dict[sites.Site, int] = {}
_cuts: dict[sites.Site, sites.Site | None] = {}


def _is_wanted() -> bool:
    return not S.busy and not S.recorder.disabled and sites.is_user_code(sys._getframe(2).f_code)


def _note(fn: str, value: Any, generator: bool, site: sites.Site) -> None:
    num = _calls.get(site, 0)
    if num >= MAX_CALLS or (not num and len(_calls) >= MAX_SITES) or len(value) < 2:
        return
    _calls[site] = num + 1
    drawn = [] if generator else rng.tally.of(SOURCES[fn])
    if site not in _cuts:
        _cuts[site] = cut_of(site)
    S.recorder.event(
        "permuted", site, fn=fn, num=len(value), digest=_digest(value), generator=generator, cut=sites.as_json(_cuts[site] or sites.UNKNOWN),
        drawn=[[sites.as_json(at), n] for at, n in drawn[:MAX_DRAWN]],
    )  # fmt: skip
    rng.tally.on = (rng.tally.on or not generator) and any(n < MAX_CALLS for n in _calls.values())


_note_quietly = quiet(_note)


def _digest(value: Any) -> int:
    if hasattr(value, "data_ptr"):  # arrays of numpy 2 have a device as well
        return digests.of_tensors([value])[0] if value.device.type == "cpu" else 0
    step = max(1, len(value) // SAMPLED)
    return digests.wide(repr([_plain(value[i]) for i in range(0, len(value), step)])[:20_000].encode())


def _plain(element: Any) -> Any:
    """Never the text of an object, which holds its address."""
    if isinstance(element, (int, float, str, tuple)):
        return element
    return element.item() if hasattr(element, "item") and getattr(element, "ndim", 1) == 0 else type(element).__name__


def cut_of(site: sites.Site) -> sites.Site | None:
    """The first statement of the function that takes a slice of what the call at this line is assigned to."""
    tree = syntax.tree(site[0])
    if tree is None:
        return None
    scope = syntax.function_at(tree, site[1])
    names = {
        target.id
        for node in syntax.nodes(scope)
        if isinstance(node, ast.Assign) and syntax.spans(node, site[1])
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    lines = [
        node.lineno
        for node in syntax.nodes(scope)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in names and isinstance(node.slice, ast.Slice)
    ]
    later = [line for line in lines if line >= site[1]]
    return (site[0], min(later), site[2]) if later else None


def _randperm(original: Any) -> Any:
    def randperm(*args: Any, **kwargs: Any) -> Any:
        value = original(*args, **kwargs)
        if _is_wanted() and not rng.is_untold(value):
            _note_quietly("randperm", value, kwargs.get("generator") is not None, sites.here(2))
        return value

    return randperm


def _in_place(fn: str) -> Any:
    def make(original: Any) -> Any:
        def shuffle(x: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(x, *args, **kwargs)
            if _is_wanted():
                _note_quietly(fn, x, False, sites.here(2))
            return result

        return shuffle

    return make


def _permutation(original: Any) -> Any:
    def permutation(x: Any, *args: Any, **kwargs: Any) -> Any:
        value = original(x, *args, **kwargs)
        if _is_wanted():
            _note_quietly("permutation", value, False, sites.here(2))
        return value

    return permutation


def _shadow(module: Any, name: str, make: Any) -> None:
    made = make(getattr(module, name))
    made.__module__, made.__qualname__, made.__name__, made.__doc__ = module.__name__, name, name, getattr(module, name).__doc__
    setattr(module, name, made)


def _arm_numpy(numpy: ModuleType) -> None:
    _shadow(numpy.random, "permutation", _permutation)
    _shadow(numpy.random, "shuffle", _in_place("shuffle"))


def arm() -> None:
    import torch

    rng.remember_constructors()
    original = torch.randperm
    torch.randperm = stand_in(original, _randperm(original))
    rng.given_back.append((torch, "randperm", original))
    _shadow(random, "shuffle", _in_place("random.shuffle"))
    on_import("numpy", _arm_numpy)
