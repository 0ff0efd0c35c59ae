"""Parameters of a wrapped model that change inside of a hook on their own gradient, in the middle of a backward: DDP has not averaged it yet.

Event "hook_update" (first MAX_TOLD, at the first steps): site (of the registration), callers (the user's frames around it, innermost first), index (of the
wrap), name, how ("step": an optimizer stepped inside of the hook | "hand"), stepped (where), no_sync, collectives (of the script's own since the backward
began: it may average by itself).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import digests, sites
from ..state import S
from . import backward, ddp, steps

MAX_TOLD = 4
NUM_STEPS = 8
_told = [0]
_stepped: list[sites.Site] = []  # of the newest step since a hook was entered
_base: list[Any] = [None, 0]  # when the backward began: what counts since the last step, and the collectives in it


@dataclass
class Before:
    """A parameter when its hook is called."""

    index: int
    digest: int


def enter(param: Any) -> Before | None:
    if _told[0] >= MAX_TOLD or S.steps >= NUM_STEPS or not S.in_backward or (index := ddp.wrap_of(param)) < 0:
        return None
    _stepped.clear()
    return Before(index, _digest(param))


def leave(param: Any, before: Before, site: sites.Site, callers: list[sites.Site]) -> None:
    if _digest(param) == before.digest:
        return
    _told[0] += 1
    wrapped = next(w for w in S.ddps if w.index == before.index)
    model = wrapped.ref()
    S.recorder.event(
        "hook_update", site, callers=[sites.as_json(s) for s in callers], index=before.index, name=wrapped.names.get(id(param), ""),
        how="step" if _stepped else "hand", stepped=sites.as_json(_stepped[-1]) if _stepped else None,
        no_sync=model is None or not model.require_backward_grad_sync,
        collectives=S.since.num_coll - (_base[1] if S.since is _base[0] else 0),
    )  # fmt: skip


def _digest(param: Any) -> int:
    return digests.of_tensors([param])[1][0]


def _at_any_step(optimizer: Any) -> None:
    if S.in_backward and _told[0] < MAX_TOLD:
        _stepped[:] = [sites.here(3)]


def _at_backward(loss: Any) -> None:
    _base[:] = [S.since, S.since.num_coll]


def arm() -> None:
    steps.at_any_step.append(_at_any_step, NUM_STEPS)
    backward.at_backward.append(_at_backward, NUM_STEPS)
