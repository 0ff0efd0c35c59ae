"""Where in the user's code a call came from. User code is what is neither torch, the standard library, site-packages nor the probe."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from types import CodeType, FrameType
from typing import Any
from zlib import crc32

_HERE = os.path.dirname(os.path.abspath(__file__))
_PATHS = sysconfig.get_paths()
_SYSTEM = tuple(
    {os.path.join(_PATHS[k], "") for k in ("stdlib", "platstdlib", "purelib", "platlib") if k in _PATHS}
    | {os.path.join(os.path.dirname(os.__file__), ""), os.path.join(_HERE, "")}
)
Site = tuple[str, int, str]  # file, line, function

# by id of the code, which is kept so that its id stays its own: hashing a code object hashes its bytes, 1 us each time
_is_user: dict[int, tuple[CodeType, bool]] = {}
_at: dict[tuple[int, int], Site] = {}  # (id of user code, instruction) -> call site; a line number costs 1 us to work out
_texts: dict[tuple[str, int], str] = {}
UNKNOWN: Site = ("", 0, "")


def is_user_file(name: str) -> bool:
    """Whether code in this file is the user's. A project that lives inside site-packages is not."""
    if name.startswith("<") or not name:
        return False
    full = os.path.abspath(name)
    return not full.startswith(_SYSTEM) and f"{os.sep}site-packages{os.sep}" not in full and f"{os.sep}dist-packages{os.sep}" not in full


def is_ours(name: str) -> bool:
    """Whether a frame's file is the probe's, or a launcher's that runs the script (harness/launch/warm_rank.py)."""
    return name.startswith((os.path.join(_HERE, ""), "<harness "))


def beyond_ours(frame: FrameType | None) -> FrameType | None:
    """The first frame from this one outwards that is not ours: the caller of what several sensors wrap."""
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_user_code(code: CodeType) -> bool:
    known = _is_user.get(id(code))
    if known is None:
        known = _is_user[id(code)] = (code, is_user_file(code.co_filename))
    return known[1]


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code, from `frame` outwards."""
    while frame is not None:
        known = _is_user.get(id(frame.f_code))
        if known[1] if known is not None else is_user_code(frame.f_code):
            return frame
        frame = frame.f_back
    return None


def switched_by_user(frame: FrameType | None) -> bool:
    """Whether the user's code called this train() or eval() itself, not torch going down into the children. Between the two stand the wrappers of
    every sensor that looks at these calls, Module.eval and DDP.train: how many is nobody's to count."""
    while frame is not None and not is_user_code(frame.f_code):
        code = frame.f_code
        if code.co_name == "<listcomp>" or (code.co_name == "train" and code.co_filename.endswith("/torch/nn/modules/module.py")):
            return False
        frame = frame.f_back
    return frame is not None


def here(depth: int = 2) -> Site:
    """Call site in the user's code, `depth` frames up or further out. About 0.5 us."""
    frame = user_frame(sys._getframe(depth))
    return UNKNOWN if frame is None else of_frame(frame)


def line(frame: FrameType) -> int:
    """The line that a frame is at. Another thread's may stand at an instruction that belongs to no line: the first line of its code then."""
    return frame.f_lineno or frame.f_code.co_firstlineno


def of_frame(frame: FrameType) -> Site:
    """Where a frame of the user's code is right now."""
    code = frame.f_code
    key = (id(code), frame.f_lasti)
    found = _at.get(key)
    if found is None:
        found = (code.co_filename, line(frame), code.co_name)
        if is_user_code(code):  # which keeps the code, and so its id
            _at[key] = found
    return found


def stack(depth: int = 2, limit: int = 6) -> list[Site]:
    """User frames, innermost first."""
    found: list[Site] = []
    frame = user_frame(sys._getframe(depth))
    while frame is not None and len(found) < limit:
        found.append(of_frame(frame))
        frame = user_frame(frame.f_back)
    return found


def text(site: Site) -> str:
    """The source line, read in the rank (the controller opens no recorded path)."""
    key = site[:2]
    if key not in _texts:
        _texts[key] = linecache.getline(site[0], site[1]).strip()[:200] if site[0] else ""
    return _texts[key]


def as_json(site: Site) -> dict[str, Any] | None:
    if not site[0]:
        return None
    return {"file": site[0], "line": site[1], "func": site[2], "text": text(site)}


def digest(site: Site) -> int:
    """Equal on all ranks for the same line: paths are hashed by base name, since nodes may mount them elsewhere."""
    return crc32(f"{os.path.basename(site[0])}:{site[1]}:{site[2]}".encode())
