"""Compilations of one frame that a Python number causes which is another one each time.

torch.compile takes an attribute such as `self.num_calls` for a constant, guards on its value, and compiles anew when that has changed. dynamo
keeps the reasons of its last 64 compilations; they are read at each step, where there are new ones.
Event "recompiled" (at 6, 12, 24, 48, ... of one frame and expression, and at the end): site (the line that reads the number), expression, num (compilations with as
many different values), first, last (the steps in which they were), seconds (all of them together), limit (how many torch allows).
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import Any

from .. import sites
from ..arm import at_close
from ..patching import quiet
from ..state import S
from . import steps

FIRST, MAX_FRAMES = 6, 64
GUARD = re.compile(r"\s*(?:\d+/\d+: )?(\S.*?) == (-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*(?:#|$)", re.MULTILINE)
SHAPES = re.compile(r"size|shape|stride|len\(|dim\b|dim\(|numel|tensor '")
FIELDS = ("recompile_reason", "co_filename", "co_firstlineno", "co_name", "entire_frame_compile_time_s")
STACK = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@dataclass
class _Frame:
    first: int
    site: sites.Site = sites.UNKNOWN
    values: set[str] = field(default_factory=set)
    in_steps: set[int] = field(default_factory=set)
    seconds: float = 0.0
    told: int = 0
    last: int = 0  # the step of the last compilation

    @property
    def num(self) -> int:
        return min(len(self.values), len(self.in_steps))


_frames: dict[tuple[Any, ...], _Frame] = {}
_last: list[Any] = [None]


def read(reason: str) -> tuple[str, str] | None:
    """(expression, value) of a guard on a number that is no shape."""
    found = GUARD.match(reason)
    if found is None or SHAPES.search(found.group(1)):
        return None
    return found.group(1), found.group(2)


def place(reason: str, file: str, line: int, name: str) -> sites.Site:
    """Where the number is read: the innermost line of the user's that the reason names, else the compiled function."""
    named = [one for one in STACK.findall(reason) if sites.is_user_file(one[0])]
    return (named[-1][0], int(named[-1][1]), named[-1][2]) if named else (file, line, name)


def _new(told: list[Any]) -> list[Any]:
    at = next((i for i in range(len(told) - 1, -1, -1) if told[i] is _last[0]), -1)
    return told[at + 1 :]


def note(reason: Any, file: Any, line: Any, name: Any, seconds: Any) -> None:
    found = read(reason) if isinstance(reason, str) and isinstance(file, str) else None
    if found is None:
        return
    key = (file, line, found[0])
    if key not in _frames and len(_frames) >= MAX_FRAMES:
        return
    frame = _frames.setdefault(key, _Frame(S.steps))
    frame.values.add(found[1])
    frame.in_steps.add(S.steps)
    frame.seconds += float(seconds or 0)
    frame.last, frame.site = S.steps, place(reason, file, int(line or 0), str(name or ""))
    if frame.num >= max(FIRST, 2 * frame.told):
        frame.told = frame.num
        _tell(frame, found[0])


def _tell(frame: _Frame, expression: str) -> None:
    S.recorder.event(
        "recompiled", frame.site, expression=expression[:120], num=frame.num, first=frame.first, last=frame.last, seconds=round(frame.seconds, 2),
        limit=int(getattr(getattr(sys.modules.get("torch._dynamo"), "config", None), "recompile_limit", 8)),
    )  # fmt: skip


@quiet
def _tell_at_the_end() -> None:
    for key, frame in _frames.items():
        if frame.told and frame.num > frame.told:
            _tell(frame, key[2])


def _at_step(optimizer: Any, witness: Any, params: Any = None) -> None:
    if not S.compiling:
        return
    reasons = getattr(sys.modules.get("torch._dynamo.utils"), "get_compilation_metrics", None)
    if reasons is None:
        return
    told = reasons()
    if not told or told[-1] is _last[0]:
        return
    for one in _new(told):
        note(*(getattr(one, name, None) for name in FIELDS))
    _last[0] = told[-1]


def arm() -> None:
    at_close.append(_tell_at_the_end)
    steps.at_step.append(_at_step)
    steps.at_light_step.append(_at_step)
