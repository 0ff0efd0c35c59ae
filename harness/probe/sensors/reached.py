"""Parameters that a backward gives gradients to and that no living optimizer holds.

The graph of a loss is walked at the 1st, 2nd, 4th, 8th, ... backward, and at the next one after a module or an
optimizer was made or a group added, within a budget of time. Where an optimizer is not reached at all, at the backward after that too: two
losses may take turns.
Event "unstepped" (a look, and the end, while there are such parameters, and once when there are none any more): opts {optimizer: how
many of its parameters this loss reaches}, num, numel, governed (elements that optimizers hold), made (the statement that made their module
in mid-run; it made none before), params (first 60): name, numel, since (step), looks, why ("sibling": the same module holds a
parameter that an optimizer has; "late": its module was made after an optimizer of the same model; "own": a module's own beside children
that optimizers have; "part": another part of the model has; "listed": its module stands in a plain list of a module that has; "": nothing else
of the model is in an optimizer); listed (the statement that makes the list).
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any

from .. import digests, marks, names, sites
from ..arm import at_close
from ..patching import contained, quiet
from ..state import S
from . import manual, steps, unregistered

MAX_TOLD = 60
MAX_STACKS = 2000  # modules whose statement is looked up, before the first step and after it
BUDGET_S = 0.05  # a process, and a thousandth of its time


class Lost:
    """A parameter that was reached and that nobody holds."""

    __slots__ = ("digest", "listed", "looks", "made", "name", "numel", "ref", "since", "why")

    def __init__(self, param: Any) -> None:
        self.ref = weakref.ref(param)
        self.numel = int(param.numel())
        self.since, self.looks, self.name, self.why = S.steps, 0, "", ""
        self.made: sites.Site | None = None
        self.listed: sites.Site | None = None
        self.digest = _digest(param)


_lost: dict[int, Lost] = {}
_moved: set[int] = set()  # stepped by hand
_next = [0]  # the backward at which the next look is due
_modules = [0]
_spent = [0.0]
_told = [False]
unheld: list[weakref.ref[Any]] = []  # leaves of the loss that was looked at last, where it reaches nothing that a known optimizer holds
_second = [False]  # the last look was followed by one at the very next backward
_began = [0.0]
_early: set[tuple[str, int]] = set()
_made: dict[int, sites.Site] = {}  # number of a module that was made in mid-run -> the innermost statement that was not run before
_held = [0]  # elements that optimizers hold
_stacks = [0, 0]


def note_module() -> None:
    """Where a module is made: lines that make some before the first step tell which line is new in mid-run."""
    late = S.steps > 0
    if _stacks[late] >= MAX_STACKS:
        return
    _stacks[late] += 1
    if not late:
        _early.update((s[0], s[1]) for s in sites.stack(3, 4))
    elif (new := next((s for s in sites.stack(3, 4) if (s[0], s[1]) not in _early and s[2] != "__init__"), None)) is not None:
        _made[names.num_made[0] - 1] = new


def look_soon() -> None:
    """The optimizers have changed."""
    _next[0] = 0


def due() -> bool:
    return S.backwards >= _next[0] or names.num_made[0] != _modules[0]


@contained
def look(loss: Any) -> None:
    began = time.perf_counter()
    _next[0] = max(1, 2 * S.backwards)
    _modules[0] = names.num_made[0]
    if _spent[0] > BUDGET_S + 0.001 * (began - _began[0]) or not marks.table or getattr(loss, "grad_fn", None) is None:
        return
    held = {id(p): o for o in marks.optimizers() for g in o.param_groups for p in g["params"]}
    reached = manual.leaves(loss)
    for key in [k for k, one in _lost.items() if k in held or one.ref() is None]:
        del _lost[key]
    _moved.difference_update(held)
    for key, param in reached.items():
        if key not in held and key not in _moved and type(param).__name__ == "Parameter" and digests.plain(param):
            _note(key, param)
    counts = {k: n for k, n in _counts(reached) if k >= 0}
    unheld[:] = [weakref.ref(p) for k, p in reached.items() if k not in held and _may_be_copied(p)] if 0 in counts.values() else []
    if _lost:
        _place(held)
    if _lost or _told[0]:
        _held[0] = sum(p.numel() for o in marks.optimizers() for g in o.param_groups for p in g["params"])
        _tell(counts)
        _second[0] = not _second[0] and 0 in counts.values()
        if _second[0]:
            _next[0] = S.backwards + 1
    _spent[0] += time.perf_counter() - began


def _may_be_copied(param: Any) -> bool:
    """FSDP1's flat parameter holds those that the optimizer has as views of it, and clears its gradient only on the way into the backward."""
    return type(param).__name__ == "Parameter" and not getattr(param, "_is_flat_param", False)


def _digest(param: Any) -> int:
    return digests.of_tensors([param])[0]


def _note(key: int, param: Any) -> None:
    one = _lost.get(key)
    if one is None or one.ref() is not param:
        one = _lost[key] = Lost(param)
    elif one.digest != _digest(param):
        del _lost[key]
        _moved.add(key)
        return
    one.looks += 1


def _place(held: dict[int, Any]) -> None:
    """Name and neighbourhood of each lost parameter."""
    first = min((m.num_modules for m in list(marks.table.values())), default=0)
    todo = {k for k, one in _lost.items() if not one.why or (one.looks < 3 and one.why != "listed")}
    for root in names.root_modules() if todo else ():
        own = {id(p): n for n, p in root.named_parameters()}
        here = todo & own.keys()
        if not here:
            continue
        mixed = any(k in held for k in own)
        for module in root.modules():
            for param in vars(module)["_parameters"].values():
                if id(param) in here:
                    _lost[id(param)].name = names.clean(own[id(param)])
                    _lost[id(param)].why = _why(module, held, first) if mixed else ""
                    _lost[id(param)].made = _made.get(names.number_of(module))
        todo -= here
    alone = {k for k, one in _lost.items() if not one.why}
    for key, (name, at) in unregistered.find(alone, held).items() if alone else ():
        _lost[key].name, _lost[key].why, _lost[key].listed = name, "listed", at


def _why(module: Any, held: dict[int, Any], first: int) -> str:
    direct = {id(p) for p in vars(module)["_parameters"].values() if p is not None}
    if any(k in held for k in direct):
        return "sibling"
    if names.number_of(module) >= first:
        return "late"
    below = [id(p) in held for p in module.parameters() if id(p) not in direct]
    return "own" if sum(below) * 2 > len(below) else "part"


def _counts(reached: dict[int, Any]) -> list[tuple[int, int]]:
    """How many parameters of each optimizer that has stepped are reached."""
    known = [(o, steps._known.get(id(o))) for o in marks.optimizers()]
    return [(-1 if w is None else w.opt, sum(id(p) in reached for g in o.param_groups for p in g["params"])) for o, w in known]


def _tell(counts: dict[int, int]) -> None:
    _told[0] = bool(_lost)
    S.recorder.event(
        "unstepped",
        opts={str(opt): num for opt, num in counts.items()},
        num=len(_lost),
        numel=sum(one.numel for one in _lost.values()),
        governed=_held[0],
        made=next((sites.as_json(one.made) for one in _lost.values() if one.made is not None), None),
        listed=next((sites.as_json(one.listed) for one in _lost.values() if one.listed is not None), None),
        params=[
            {"name": one.name, "numel": one.numel, "since": one.since, "looks": one.looks, "why": one.why}
            for one in sorted(_lost.values(), key=lambda one: one.name)[:MAX_TOLD]
        ],
    )


def _finish() -> None:
    """What was stepped by hand since the last look."""
    if not _lost or "torch" not in sys.modules:
        return
    gone = [k for k, one in _lost.items() if (p := one.ref()) is not None and p.is_cpu and _digest(p) != one.digest]
    for key in gone:
        del _lost[key]
    if gone:
        _tell({})


def arm() -> None:
    """Backward, optimizers and modules call this file."""
    _began[0] = time.perf_counter()
    at_close.append(quiet(_finish))
