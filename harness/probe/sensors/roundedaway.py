"""Parameters kept in half precision, which a step leaves as they were because it is smaller than the distance to the next number.

Event "rounded_away" (at the end, once an optimizer that has such parameters): site (of the step), opt, dtype, looks [[lr, lost, num]]: of sampled
elements with a gradient, how many a step left unchanged; cast (the call that put the parameters into this type; null where that was not seen);
still [of the sampled elements, how many were at the last look as they were at the first, of how many]; stuck (names of parameters of which all were,
first 20), num_stuck, num_params.
Read at two steps in 4 of those with digests; models in float32, under autocast too, cost one look at their types.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from .. import digests, sites
from ..arm import at_close
from ..patching import after, contained, quiet
from ..state import S
from . import steps

EVERY, MAX_PARAMS, MAX_LOOKS, MAX_NAMES = 4, 64, 64, 20


@dataclass
class Half:
    """The half-precision parameters of one optimizer."""

    opt: int
    dtype: str
    params: list[tuple[str, weakref.ref[Any]]]
    cast: sites.Site
    site: sites.Site = sites.UNKNOWN
    before: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # position -> (values, gradients) as sampled before a step
    lr: float = 0.0
    looks: list[tuple[float, int, int]] = field(default_factory=list)
    ends: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # position -> values at the first look and at the last one


_half: dict[int, Half] = {}
_cast: dict[int, sites.Site] = {}  # id of a module that a call has put into half precision, and of those inside -> the call


def _after_cast(result: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    import torch

    first = next(module.parameters(), None)
    if first is not None and first.dtype in (torch.bfloat16, torch.float16):
        _cast.update({id(m): sites.here(4) for m in module.modules()})


def _cast_at(witness: Any) -> sites.Site:
    for root in (r for ref in witness.roots if (r := ref()) is not None):
        found = next((_cast[id(m)] for m in root.modules() if id(m) in _cast), None)
        if found is not None:
            return found
    return sites.UNKNOWN


def _of(witness: Any, params: list[Any]) -> Half:
    import torch

    kinds = (torch.bfloat16, torch.float16)
    named = [(n, p) for n, p in zip(witness.names, params, strict=False) if p is not None and p.dtype in kinds and p.is_cpu and digests.plain(p)]
    dtype = str(named[0][1].dtype).removeprefix("torch.") if named else ""
    return Half(witness.opt, dtype, [(n, weakref.ref(p)) for n, p in named[:MAX_PARAMS]], _cast_at(witness) if named else sites.UNKNOWN)


@contained
def _look(optimizer: Any, witness: Any, params: Any) -> None:
    half = _half.get(witness.opt)
    if half is None:
        half = _half[witness.opt] = _of(witness, params)
    if not half.params or len(half.looks) >= MAX_LOOKS:
        return
    if S.steps % EVERY == 1 and half.before:
        _compare(half)
    half.before = {}
    if S.steps % EVERY == 0:
        half.site, half.lr = sites.here(4), float(optimizer.param_groups[0]["lr"])
        for at, (_, ref) in enumerate(half.params):
            p = ref()
            if p is not None and p.grad is not None and (values := digests.bits(p)) and (gradients := digests.bits(p.grad)):
                half.before[at] = values, gradients


def _compare(half: Half) -> None:
    lost = num = 0
    for at, (values, gradients) in half.before.items():
        p = half.params[at][1]()
        now = digests.bits(p) if p is not None else None
        if now is None or len(now) != len(values) or len(gradients) != len(values):
            continue
        graded = [i for i in range(0, len(values), 2) if gradients[i] | (gradients[i + 1] & 0x7F)]
        same = sum(now[i : i + 2] == values[i : i + 2] for i in graded)
        num, lost = num + len(graded), lost + same
        if graded:
            half.ends[at] = half.ends.get(at, (values,))[0], now
    half.looks.append((half.lr, lost, num))


@quiet
def _tell() -> None:
    for half in _half.values():
        if half.looks:
            words = {at: [a[i : i + 2] == b[i : i + 2] for i in range(0, len(a), 2)] for at, (a, b) in half.ends.items()}
            stuck = [half.params[at][0] for at in sorted(words) if all(words[at])]
            S.recorder.event(
                "rounded_away", half.site, opt=half.opt, dtype=half.dtype, looks=half.looks, cast=sites.as_json(half.cast),
                still=[sum(map(sum, words.values())), sum(map(len, words.values()))], stuck=stuck[:MAX_NAMES], num_stuck=len(stuck), num_params=len(words),
            )  # fmt: skip


def arm() -> None:
    import torch

    for name in ("to", "half", "bfloat16", "type"):
        after(torch.nn.Module, name, _after_cast)
    steps.at_step.append(_look)
    at_close.append(_tell)
