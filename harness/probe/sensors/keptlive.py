"""Several state dicts that are kept in one container, all of them the live weights: snapshots that are meant to be of different steps.

Looked at where the script reads out a state at the third to eighth time from one line, and where it loads one: in the variables of the frames
that the call came through and in the attributes of their objects.
Event "kept_live" (once a line): site (the statement that reads the state out), num (dicts that are the live weights), name (of the container),
steps (of the first and of the last time that the line was reached before).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

from .. import digests, sites, variables
from ..patching import contained
from ..state import S
from . import states, steps

FIRST, LAST, MAX_FRAMES, MAX_ENTRIES, MAX_TENSORS, MAX_ATTRIBUTES = 3, 8, 4, 4, 64, 60
_read: dict[tuple[str, int], list[int]] = {}  # line -> steps at which it was reached
_told: set[tuple[str, int]] = set()


@contained
def _at_read(site: sites.Site) -> None:
    reached = _read.setdefault(site[:2], []) if len(_read) < 64 else []
    reached.append(S.steps)
    if FIRST <= len(reached) <= LAST and reached[-2] > reached[0] and site[:2] not in _told:
        _look(site, reached[:-1])  # this one is not in the container yet


@contained
def _at_load(module: Any, site: sites.Site, told: Any) -> None:
    """The last snapshot may be put to use before the line is reached a third time."""
    for place, reached in list(_read.items()):
        if 1 < len(reached) < LAST and reached[-1] > reached[0] and place not in _told:
            _look((*place, ""), reached)


def _look(site: sites.Site, reached: list[int]) -> None:
    if len(set(reached)) < len(reached):  # several in one step: they are handed out alike, none is meant to be of another step
        return
    live = steps.weights()
    for name, held in _containers(sites.user_frame(sys._getframe(1))):
        kept = [one for one in _states(held) if live and _are_live(one, live)]
        if len(kept) > 1 and len({id(one) for one in kept}) == len(kept) and len({_place(one) for one in kept}) == 1:
            _told.add(site[:2])
            S.recorder.event("kept_live", site, num=len(kept), name=name, steps=[reached[0], reached[-1]])
            return


def _containers(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Lists, deques and dicts by number (of an epoch) among the variables of the user's frames, and among the attributes of what these hold, two levels deep."""
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        names = frame.f_locals
        found = [pair for name, value in list(names.items())[:MAX_ATTRIBUTES] for pair in _within(name, value, 2)]
        variables.let_go(frame, names)
        yield from found
        frame = sites.user_frame(frame.f_back)


def _within(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if type(value) in (list, deque) or (type(value) is dict and all(type(key) is int for key in value)):
        if len(value) > 1:
            yield name, value
    elif depth and is_plain_object(value):
        for attribute, inner in list(vars(value).items())[:MAX_ATTRIBUTES]:
            yield from _within(f"{name}.{attribute}", inner, depth - 1)


def is_plain_object(value: Any) -> bool:
    """Of a class of the user's: torch's own objects keep no snapshots."""
    module = sys.modules.get(type(value).__module__)
    return hasattr(value, "__dict__") and not isinstance(value, type) and sites.is_user_file(getattr(module, "__file__", None) or "")


def _states(held: Any) -> list[Any]:
    """The state dicts among the last entries of a container, themselves or one level down (`{"epoch": 3, "state": ...}`)."""
    entries = list(held.values() if isinstance(held, dict) else held)[-MAX_ENTRIES:]
    found = []
    for entry in entries:
        inner = list(entry.values())[:8] if isinstance(entry, dict) else list(entry)[:8] if type(entry) is tuple else []
        found += [one for one in (entry, *inner) if isinstance(one, dict) and _tensors(one)][:1]
    return found


def _tensors(state: dict[Any, Any]) -> list[Any]:
    import torch

    return [t for t in list(state.values())[:MAX_TENSORS] if type(t) is torch.Tensor and not t.requires_grad and t.dim()]


def _are_live(state: dict[Any, Any], live: set[int]) -> bool:
    tensors = _tensors(state)
    return 2 * sum(digests.address(t) in live for t in tensors) > len(tensors)


def _place(state: dict[Any, Any]) -> tuple[tuple[str, int], ...]:
    """Names and memory: those of two models are two."""
    return tuple((str(k), digests.address(t)) for k, t in list(state.items())[:MAX_TENSORS] if hasattr(type(t), "data_ptr"))


def arm() -> None:
    states.at_read.append(_at_read)
    states.at_loaded.append(_at_load)
