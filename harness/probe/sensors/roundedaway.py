"""Parameters kept in half precision, which a step leaves as they were because it is smaller than the distance to the next number.

Event "rounded_away" (at the end, once an optimizer that has such parameters): site (of the step), opt, dtype, looks [[group, lr, lost, num]]: of sampled
elements with a gradient, how many a step left unchanged; cast (the call that put the parameters into this type; null where that was not seen);
still [of the sampled elements, how many were at the last look as they were at the first, of how many]; stuck (names of parameters of which all were,
first 20), num_stuck, num_params.
Only of torch's own optimizers: another one may keep what a step leaves over (float32 copies, a compensation), or round at random.
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
    params: list[tuple[str, int, weakref.ref[Any]]]  # name, group
    cast: sites.Site
    site: sites.Site = sites.UNKNOWN
    before: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # position -> (values, gradients) as sampled before a step
    rates: list[float] = field(default_factory=list)  # of the groups, at that step
    looks: list[tuple[int, float, int, int]] = field(default_factory=list)
    ends: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # position -> values at the first look and at the last one


_half: dict[int, Half] = {}
_cast: weakref.WeakKeyDictionary[Any, sites.Site] = weakref.WeakKeyDictionary()  # module that a call has put into half precision -> the call


def _after_cast(result: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    import torch

    first = next(module.parameters(), None)
    if first is not None and first.dtype in (torch.bfloat16, torch.float16):
        _cast.update(dict.fromkeys(module.modules(), sites.here(4)))


def _cast_at(witness: Any) -> sites.Site:
    for root in (r for ref in witness.roots if (r := ref()) is not None):
        found = next((_cast[m] for m in root.modules() if m in _cast), None)
        if found is not None:
            return found
    return sites.UNKNOWN


def _of(optimizer: Any, witness: Any, params: list[Any]) -> Half:
    import torch

    kinds = (torch.bfloat16, torch.float16)
    group_of = {id(p): at for at, group in enumerate(optimizer.param_groups) for p in group["params"]}
    own = type(optimizer).__module__.startswith("torch.optim")
    named = [(n, p) for n, p in zip(witness.names, params, strict=False) if own and p is not None and p.dtype in kinds and p.is_cpu and digests.plain(p)]
    dtype = str(named[0][1].dtype).removeprefix("torch.") if named else ""
    kept = [(n, group_of.get(id(p), 0), weakref.ref(p)) for n, p in named[:MAX_PARAMS]]
    return Half(witness.opt, dtype, kept, _cast_at(witness) if named else sites.UNKNOWN)


def _rate(group: Any) -> float:
    """1 where the optimizer finds its rate by itself (None)."""
    rate = group.get("lr")
    return float(rate) if isinstance(rate, (int, float)) or hasattr(rate, "item") else 1.0


@contained
def _look(optimizer: Any, witness: Any, params: Any) -> None:
    half = _half.get(witness.opt)
    if half is None:
        half = _half[witness.opt] = _of(optimizer, witness, params)
    if not half.params or len(half.looks) >= MAX_LOOKS:
        return
    if S.steps % EVERY == 1 and half.before:
        _compare(half)
    half.before = {}
    if S.steps % EVERY == 0:
        half.site, half.rates = sites.here(4), [_rate(g) for g in optimizer.param_groups]
        for at, (_, _, ref) in enumerate(half.params):
            p = ref()
            if p is not None and p.grad is not None and p.stride() == p.grad.stride() and (v := digests.bits(p)) and (g := digests.bits(p.grad)):
                half.before[at] = v, g


def _compare(half: Half) -> None:
    counts: dict[int, list[int]] = {}
    bounds = {b for values, _ in half.before.values() if (b := _bound(values)) is not None}
    for at, (values, gradients) in half.before.items():
        _, group, ref = half.params[at]
        now = digests.bits(p) if (p := ref()) is not None else None
        if now is None or len(now) != len(values) or len(gradients) != len(values):
            continue
        free = [i for i, size in zip(range(0, len(values), 2), _sizes(values), strict=True) if size not in bounds]
        graded = [i for i in free if gradients[i] | (gradients[i + 1] & 0x7F)]
        same = sum(now[i : i + 2] == values[i : i + 2] for i in graded)
        count = counts.setdefault(group, [0, 0])
        count[0], count[1] = count[0] + same, count[1] + len(graded)
        if graded:
            half.ends[at] = half.ends.get(at, (values,))[0], now
    half.looks += [(group, half.rates[group] if group < len(half.rates) else 1.0, lost, num) for group, (lost, num) in counts.items() if num]


def _sizes(values: bytes) -> list[int]:
    """The absolute values, as their bits."""
    return [int.from_bytes(values[i : i + 2], "little") & 0x7FFF for i in range(0, len(values), 2)]


def _bound(values: bytes) -> int | None:
    """The size at which many elements stand, of both signs: the ends of an interval to which the script clamps them after each step."""
    sizes = _sizes(values)
    top = max(sizes, default=0)
    signs = {values[2 * i + 1] >> 7 for i, size in enumerate(sizes) if size == top}
    return top if sizes.count(top) > 0.1 * len(sizes) and len(signs) == 2 else None


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
