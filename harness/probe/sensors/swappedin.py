"""Averages of the weights (EMA, SWA) that are written into the trained model between two steps, for an evaluation, and what becomes of them.

Looked at are `p.copy_(s)`, `torch._foreach_copy_` and `load_state_dict`, by one parameter that they write, from the first step on. What it held before,
what is written and who holds either of them is asked when it is written, whether it is evaluated at the model's next forward, what it holds then at the
optimizer's next steps.
Event "swapped_in" (when the next write comes, or at the end; 6 a parameter, 16 in all): site (the statement that writes), callers (the user's frames,
innermost first), within (of these, the one that has evaluated as well, or that is a generator), evaluated (no training in between), stays (the next step
starts from what was written), returned (what was there before came back at a later step), same (the source is the one of the time before, and has moved),
follows (steps at which it moved towards the weights), kept (the name that held what was there before; None: nobody did), used (the source has a use for it,
see writtenback.py).
About 4 us a copy_ of the script's until its statement has missed the weights 32 times, then 1; 2 to 6 ms at each of the 16, for the search of what holds the
values (of 48 and of 600 parameters), and once more at its evaluation; 10 us at each of 32 steps behind it.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from .. import copies, digests, heldvalues, modulehooks, sites, writtenback
from ..arm import at_close
from ..patching import contained, quiet
from ..state import S
from . import averaged, states, steps

MAX_TOLD, MAX_SAME, MAX_PARAMS, MAX_MISSES, MAX_HITS, REFRESH = 16, 6, 4, 32, 64, 64
MAX_LOOKS = 32  # steps behind a write: what comes back comes back soon
MAX_HOLDERS = 4
_known: list[Any] = [-REFRESH, 0, {}]  # when it was read, of how many optimizers, where a parameter lies -> itself
_asked: dict[sites.Site, Asked] = {}
_watched: list[Watched] = []
_open: list[Swap] = []  # those that the next steps look at
_hook: list[Any] = []
_told = [0]
_off = [True]  # emptied once copies are watched


@dataclass
class Asked:
    """A statement that writes."""

    missed: int = -1  # the last step at which it did not write weights
    misses: int = 0
    hit: int = -1  # the last step at which it did
    hits: int = 0
    looked: int = -1  # the last step at which one of its writes was looked at

    def is_over(self) -> bool:
        return self.misses >= MAX_MISSES or self.hits >= MAX_HITS or _told[0] >= MAX_TOLD

    def note(self, is_hit: bool) -> None:
        if is_hit:
            self.hits += self.hit != S.steps
            self.hit = S.steps
        else:
            self.misses += self.missed != S.steps
            self.missed = S.steps


@dataclass(eq=False)
class Holder:
    """What holds an average."""

    tensor: weakref.ref[Any]
    way: heldvalues.Way | None

    def now(self) -> Any:
        found = self.way.end() if self.way is not None else None
        return found if type(found) is digests.tensor_kind() else self.tensor()


@dataclass(eq=False)
class Swap:
    """One write into a parameter."""

    site: sites.Site
    callers: list[sites.Site]
    generator: sites.Site | None
    had: bytes
    given: bytes
    holders: list[Holder]  # tensors beside the parameter that hold what is written
    names: set[heldvalues.Name]  # of tensors that hold what was there before
    step: int
    backwards: int
    same: bool = False
    evaluated: bool = False
    within: sites.Site | None = None
    now: bytes = b""  # what it holds since it was evaluated
    stays: bool | None = None  # None: no step has come yet
    returned: bool = False
    looks: int = 0
    values: list[float] = field(default_factory=list)  # of a holder, at the last look


@dataclass(eq=False)
class Watched:
    """A parameter that was written to."""

    param: weakref.ref[Any]
    swap: Swap | None = None
    follows: int = 0
    told: int = 0


# ---- writes ----
def _weights() -> dict[int, weakref.ref[Any]]:
    if S.steps - _known[0] >= REFRESH or _known[1] != len(steps._known):
        params = [p for w in list(steps._known.values()) for p in w.current() if p is not None]
        _known[:] = [S.steps, len(steps._known), {at: weakref.ref(p) for p in params if (at := digests.address(p))}]
    return _known[2]  # type: ignore[no-any-return]


@contained
def _look(written: Any, source: Any, site: sites.Site) -> bool:
    asked = _asked.setdefault(site, Asked())
    if asked.is_over():
        return True
    ref = _weights().get(at := digests.address(written))
    asked.note(ref is not None)
    if ref is not None and (param := ref()) is not None and digests.address(param) == at:  # `p.data = ...` may have moved it
        _write(param, source, site, asked)
    return False


@contained
def _before_load(module: Any, state_dict: Any, site: sites.Site) -> None:
    asked = _asked.setdefault(site, Asked())
    if not S.steps or _off or S.compiling or asked.is_over() or not isinstance(state_dict, dict):
        return
    known = _weights()
    hits = [(name, p) for name, p in module.named_parameters() if digests.address(p) in known]
    asked.note(bool(hits))
    for name, param in hits:
        source = dict.get(state_dict, name)
        if isinstance(source, digests.tensor_kind()) and digests.plain(source):
            _write(param, source, site, asked)


def _write(param: Any, source: Any, site: sites.Site, asked: Asked) -> None:
    """A statement is looked at by the first parameter that it writes, and by those that are watched already."""
    watched = next((w for w in _watched if w.param() is param), None)
    if watched is None and (asked.looked == S.steps or len(_watched) >= MAX_PARAMS):
        return
    if watched is not None and watched.told >= MAX_SAME:
        asked.looked = S.steps
        return
    if digests.address(source) in _weights() or source.shape != param.shape:
        return
    if _is_captured(param):
        return
    had, given = bits(param), bits(source)
    if not had or not given or had == given or not _is_varied(had, param.element_size()):
        return
    asked.looked = S.steps
    if watched is not None and watched.swap is not None and (watched.swap.had == given or watched.swap.step == S.steps):
        watched.swap.returned = watched.swap.returned or (watched.swap.had == given and watched.swap.step < S.steps)
        return  # put back
    if watched is None:
        _watched.append(watched := Watched(weakref.ref(param)))
    _begin(watched, param, source, site, had, given)


def _begin(watched: Watched, param: Any, source: Any, site: sites.Site, had: bytes, given: bytes) -> None:
    frame = sites.user_frame(sys._getframe(2))
    holders, names = _held(frame, param, had, given)
    callers = sites.stack(4)
    swap = Swap(site, callers, _generator(frame), had, given, holders, names, S.steps, S.backwards)
    if (last := watched.swap) is not None:
        swap.same = last.given != given and any(t is not None and bits(t) == given for t in (h.now() for h in last.holders))
        _conclude(watched)
    watched.swap = swap
    _open.append(swap)
    _listen()


def _held(frame: FrameType | None, param: Any, had: bytes, given: bytes) -> tuple[list[Holder], set[heldvalues.Name]]:
    holders: list[Holder] = []
    names: set[heldvalues.Name] = set()
    trained = _weights()
    for held in heldvalues.tensors(frame, param.shape):
        if digests.address(held.tensor) in trained:
            continue
        found = bits(held.tensor)
        if found == given and len(holders) < MAX_HOLDERS:
            holders.append(Holder(weakref.ref(held.tensor), held.way))
        elif found == had:
            names.add(held.name)
    return holders, names


def _generator(frame: FrameType | None) -> sites.Site | None:
    """Where a context manager of the user's writes: what it puts in, it should take out behind its yield."""
    while frame is not None:
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            return sites.of_frame(frame)
        frame = sites.user_frame(frame.f_back)
    return None


def bits(tensor: Any) -> bytes:
    """Of sampled elements; nothing of a tensor that is not plain and contiguous."""
    if not digests.plain(tensor) or not tensor.is_contiguous():
        return b""
    found = digests.bits(tensor, lasting=False) if tensor.is_cpu else None
    return digests.to_bytes(digests.sampled(tensor.detach())) if found is None else found


def _is_captured(param: Any) -> bool:
    """In the capture of a CUDA graph: to read what a device holds would break it."""
    import torch as untyped

    torch: Any = untyped
    return not param.is_cpu and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())


def _is_varied(found: bytes, width: int) -> bool:
    """Zeros and ones are equal to many a tensor."""
    return len({found[i : i + width] for i in range(0, len(found), width)}) > 3


# ---- evaluations ----
def _listen() -> None:
    import torch

    if not _hook and not S.compiling:
        _hook.append(torch.nn.modules.module.register_module_forward_pre_hook(_seen))


def _deafen() -> None:
    modulehooks.remove(_hook)


def _seen(module: Any, args: Any) -> None:
    if not S.busy and module._parameters:
        _forward(module)


@quiet
def _forward(module: Any) -> None:
    import torch

    if S.compiling:
        _deafen()
        return
    waiting = [(w, p) for w in _watched if w.swap in _open and w.swap is not None and not w.swap.now and (p := w.param()) is not None]
    for watched, param in waiting:
        swap = watched.swap
        if swap is not None and any(param is own for own in module._parameters.values()) and not _is_captured(param):
            swap.now = bits(param)
            swap.evaluated = swap.backwards == S.backwards and not (module.training and torch.is_grad_enabled()) and swap.now not in (b"", swap.had)
            if swap.evaluated:
                frame = sites.user_frame(sys._getframe(3))
                swap.within = swap.generator or _common(swap.callers, sites.stack(4, limit=12))
                if swap.names:
                    swap.names |= _held(frame, param, swap.had, b"-")[1]
            waiting = [one for one in waiting if one[0] is not watched]
    if not waiting:
        _deafen()


def _common(writing: list[sites.Site], evaluating: list[sites.Site]) -> sites.Site | None:
    functions = {(at[0], at[2]) for at in evaluating}
    return next((at for at in writing if (at[0], at[2]) in functions), None)


# ---- steps ----
@contained
def _before_step(optimizer: Any) -> None:
    _deafen()
    for watched in _watched:
        if watched.swap in _open and watched.swap is not None:
            param = watched.param()
            if param is None or not _goes_on(watched, watched.swap, param):
                _open.remove(watched.swap)


@contained
def _goes_on(watched: Watched, swap: Swap, param: Any) -> bool:
    """Whether the next step has something to look at; not after a look that has failed."""
    swap.looks += 1
    if _is_captured(param):
        return swap.looks <= MAX_LOOKS
    now = bits(param)
    if swap.stays is None:
        swap.stays = swap.evaluated and now == swap.now
    swap.returned = swap.returned or now == swap.had
    if not swap.stays or swap.returned or swap.looks > MAX_LOOKS:
        return False
    _follow(watched, swap, param)
    return bool(param.is_cpu) or watched.follows < 2


def _follow(watched: Watched, swap: Swap, param: Any) -> None:
    if watched.follows >= 2:
        return
    holder = next((t for h in swap.holders if (t := h.now()) is not None), None)
    if holder is None or holder.shape != param.shape or not bits(holder):
        return
    values, last = digests.sampled(holder.detach()).tolist(), swap.values
    swap.values = values
    live = digests.sampled(param.detach()).tolist()
    if last and last != values and values != live:  # a copy of the weights is no average of them
        watched.follows += averaged.approaches(last, values, live)


def _conclude(watched: Watched) -> None:
    swap = watched.swap
    if swap in _open and swap is not None:
        _open.remove(swap)
    if swap is None or swap.stays is None or _told[0] >= MAX_TOLD:
        return
    watched.told += 1
    _told[0] += 1
    kept = sorted(swap.names)
    S.recorder.event(
        "swapped_in", swap.site, callers=[sites.as_json(at) for at in swap.callers], within=sites.as_json(swap.within) if swap.within else None,
        evaluated=swap.evaluated, stays=swap.stays, returned=swap.returned, same=swap.same, follows=watched.follows,
        kept=kept[0].name if kept else None, used=any(writtenback.has_use(name) for name in kept) if swap.stays else False,
    )  # fmt: skip
    watched.swap = None


def _close() -> None:
    for watched in _watched:
        _conclude(watched)


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    _off.clear()
    copies.watch(__name__, _look)


def arm() -> None:
    states.before_load.append(_before_load)
    steps.at_step.append(_at_step, when=_off)
    steps.at_any_step.append(_before_step, when=_open)
    at_close.append(quiet(_close))
