"""What the script says and writes: print, logging, files opened for writing.

Event "print" (first 400): site, text (300 characters), stream. Event "log": site, text, level, logger.
Event "open": path, mode ("w" | "a" | "r" of a file some rank wrote), site. From the audit hook, which sees every way to open a file.
"""

from __future__ import annotations

import builtins
import os
import sys
from typing import Any

from .. import sites
from ..patching import after, quiet, wrap
from ..state import S

MAX_OPENS = 1000
_quiet_roots = tuple(os.path.join(p, "") for p in {sys.prefix, sys.base_prefix, "/proc", "/dev", "/sys", "/usr", "/lib", "/etc", "/run"})
_opened: dict[tuple[str, str], int] = {}


def _print(original: Any) -> Any:
    note = quiet(_note_print)

    def print(*args: Any, **kwargs: Any) -> Any:  # noqa: A001  (it stands in for the builtin, for tracebacks' sake too)
        if not S.recorder.disabled:
            note(args, kwargs, sites.here(2))
        return original(*args, **kwargs)

    return print


def _note_print(args: Any, kwargs: Any, site: sites.Site) -> None:
    file = kwargs.get("file")
    if file is not None and file not in (sys.stdout, sys.stderr):
        return
    text = str(kwargs.get("sep", " ") if kwargs.get("sep") is not None else " ").join(_text(a) for a in args)
    S.recorder.event("print", site, text=text[:300])


def _text(value: Any) -> str:
    """As print would show it, without waiting for a device."""
    device = getattr(getattr(value, "device", None), "type", "cpu")
    return f"<{device} tensor>" if device != "cpu" else str(value)[:300]


def _after_log(result: Any, logger: Any, record: Any) -> None:
    site = (record.pathname, record.lineno, record.funcName)
    if sites.is_user_file(record.pathname) and logger.isEnabledFor(record.levelno):
        S.recorder.event("log", site, text=record.getMessage()[:300], level=record.levelname, logger=logger.name)


def _audit(event: str, args: Any) -> None:
    if event != "open" or S.busy or S.recorder.disabled or S.recorder.closed:
        return
    path, mode, flags = args
    if not isinstance(path, str):
        return
    writing = bool((flags or 0) & (os.O_WRONLY | os.O_RDWR)) or (isinstance(mode, str) and any(c in mode for c in "wax+"))
    if not writing:
        return
    full = os.path.abspath(path)
    if full.startswith(_quiet_roots) or full.startswith(S.recorder.run_dir) or "__pycache__" in full:
        return
    _note_open(full, mode, flags)


@quiet
def _note_open(full: str, mode: Any, flags: int) -> None:
    frame = sites.user_frame(sys._getframe(3))
    if frame is None or "/torchinductor_" in full:
        return
    site = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    kind = "a" if (isinstance(mode, str) and "a" in mode) or (flags or 0) & os.O_APPEND else ("x" if isinstance(mode, str) and "x" in mode else "w")
    key = (full, f"{site[1]}")
    _opened[key] = _opened.get(key, 0) + 1
    if len(_opened) <= MAX_OPENS and _opened[key] <= 40:
        S.recorder.event("open", site, path=os.path.realpath(full), mode=kind, exists=os.path.exists(full), temporary=_is_temporary(full))


def _is_temporary(path: str) -> bool:
    """By name only: tempfile.gettempdir() takes a lock that the audited call may hold."""
    return path.startswith(tuple(os.path.join(os.environ.get(k) or "/tmp", "tmp") for k in ("TMPDIR", "TEMP", "TMP")))


def arm() -> None:
    import logging

    wrap(builtins, "print", _print)
    after(logging.Logger, "callHandlers", _after_log)
    sys.addaudithook(_audit)
