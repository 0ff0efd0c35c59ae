"""What the script says and writes: print, logging, files opened, directories made, renames.

Event "print" (first 400): site, text (300 characters), stream (1 or 2). Only what reaches the process's real stdout or stderr: a rank
that mutes itself is silent. Event "log" (first 400): site, text, level, logger, console (a handler writes it to the terminal), format
(that handler's). Event "open" (first 1000): site, path (real), mode ("w" truncates | "a" | "x" exclusive | "+" in place | "r" of a file
that is younger than this process, or missing), exists, locks (file locks taken so far).
Event "mkdir" (first 200): site, path. Event "remove" (first 200): site, path (real), how ("tree" | "dir" | "file"), exists, locks; what rmtree
removes inside its tree is not told. Event "rename" (first 400): site, src, dst (real paths).
Event "event_file": path, torn_at: a TensorBoard file that ends within a record although its writer has gone. Event "sleep" (first 200):
site; a script that polls.

Files and directories come from an audit hook, which sees every way to open them. It runs inside calls that may hold locks, so it takes
none, and must not raise: an exception there would abort the user's call.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from .. import eventfiles, protocol, sites
from ..arm import at_close
from ..patching import after, before, quiet, wrap
from ..state import S

TEMPFILE = f"{os.path.dirname(os.__file__)}/tempfile.py"
MAX = {"print": 400, "log": 400, "open": 1000, "mkdir": 200, "rename": 400, "sleep": 200, "remove": 200}
MAX_SAME_OPEN = 40  # of one file from one line
_counts: dict[str, int] = {}
_opened: dict[tuple[str, int], int] = {}
_event_files: dict[str, bool] = {}  # path -> told
_locks = [0]
_born = [0.0]
_installed = (
    os.path.join(base, part) for base in (sys.prefix, sys.base_prefix, "/usr", "/usr/local") for part in ("lib", "lib64", "share")
)
_quiet_roots = tuple(
    os.path.join(p, "") for p in (*_installed, "/proc", "/dev", "/sys", "/lib", "/etc", "/run")
)  # not /usr: containers work in /usr/src
_hidden_home = os.path.join(os.path.expanduser("~"), ".")  # caches and settings of libraries: ~/.cache, ~/.config, ~/.triton


def _room(kind: str) -> bool:
    """Whether another event of this kind is kept; counts it."""
    _counts[kind] = _counts.get(kind, 0) + 1
    return _counts[kind] <= MAX[kind]


# ---- print and logging ----
def _print(original: Any) -> Any:
    note = quiet(_note_print)

    def print(*args: Any, **kwargs: Any) -> Any:
        if _counts.get("print", 0) < MAX["print"]:
            note(args, kwargs, sites.here(2))
        return original(*args, **kwargs)

    return print


def _note_print(args: Any, kwargs: Any, site: sites.Site) -> None:
    stream = _terminal(kwargs.get("file") or sys.stdout)
    if stream and _room("print"):
        sep = kwargs.get("sep")
        S.recorder.event("print", site, text=(" " if not isinstance(sep, str) else sep).join(_text(a) for a in args)[:300], stream=stream)


def _terminal(stream: Any) -> int:
    """1 or 2 where this stream is the process's own stdout or stderr and not /dev/null; else 0."""
    for number, own in ((1, sys.__stdout__), (2, sys.__stderr__)):
        if stream is own and own is not None:
            return 0 if os.fstat(number).st_rdev == os.stat(os.devnull).st_rdev else number
    return 0


def _text(value: Any) -> str:
    """As print would show it where that is plain text or numbers. Nothing of the user's is called, no device is waited for."""
    if isinstance(value, str):
        return str.__str__(value)[:300]
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if type(value) in (list, tuple, set, dict) and len(value) <= 32:
        inner = value.items() if isinstance(value, dict) else value
        return f"[{', '.join(_text(v) for v in inner)}]"[:300]
    kind = type(value)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if (numpy and issubclass(kind, numpy.generic)) or (
        torch and kind is torch.Tensor and value.device.type == "cpu" and value.numel() == 1
    ):
        return str(value.item())
    return f"<{kind.__name__}>"


def _after_log(result: Any, logger: Any, record: Any) -> None:
    if not sites.is_user_file(record.pathname) or not _room("log"):
        return
    console, formats = _console(logger, record)
    args = record.args if isinstance(record.args, tuple) else ()
    plain = all(isinstance(a, (str, int, float, type(None))) for a in args)
    text = (
        record.getMessage()
        if plain and isinstance(record.msg, str)
        else str(record.msg)
        if isinstance(record.msg, str)
        else _text(record.msg)
    )
    site = (record.pathname, record.lineno, record.funcName)
    S.recorder.event("log", site, text=text[:300], level=record.levelname, logger=record.name, console=console, format=formats)


def _console(logger: Any, record: Any) -> tuple[bool, str]:
    """Whether a handler sends the record to the terminal, and in which format."""
    import logging

    at, handlers = logger, []
    while at is not None:
        handlers.extend(at.handlers)
        at = at.parent if at.propagate else None
    if not handlers and logging.lastResort is not None:
        handlers = [logging.lastResort]
    for handler in handlers:
        stream = getattr(handler, "stream", None) or getattr(getattr(handler, "console", None), "file", None)  # `console`: rich's handler
        if stream is not None and record.levelno >= handler.level and _terminal(stream):
            return True, str(getattr(handler.formatter, "_fmt", "") or "")
    return False, ""


# ---- files ----
def _audit(event: str, args: Any) -> None:
    call = _AUDITED.get(event)
    if call is None or S.busy or S.recorder.disabled or S.recorder.closed:
        return
    with contextlib.suppress(Exception):
        call(*args)


def _ours(full: str) -> bool:
    run = S.recorder.run_dir
    return full.startswith(
        (os.path.join(run, protocol.REC_DIR, ""), os.path.join(run, protocol.LOG_DIR, ""), os.path.join(run, protocol.STACKS_REQUEST))
    )


def _boring(full: str) -> bool:
    return (
        full.startswith(_quiet_roots) or full.startswith(_hidden_home) or "__pycache__" in full or "/torchinductor_" in full or _ours(full)
    )


def _on_open(path: Any, mode: Any, flags: Any) -> None:
    if isinstance(path, int) or path is None or _counts.get("open", 0) >= MAX["open"]:
        return
    flags = flags if isinstance(flags, int) else 0
    mode = mode if isinstance(mode, str) else ""
    writing = bool(flags & (os.O_WRONLY | os.O_RDWR)) or any(c in mode for c in "wax+")
    full = os.path.abspath(os.fsdecode(path))
    if full.endswith((".py", ".pyc", ".so")) or _boring(full) or not (writing or _fresh(full)):
        return
    if writing and os.path.isdir(full):
        return  # tempfile opens its folder and makes the file by an opener of its own
    _note_open(full, _kind(mode, flags) if writing else "r")


def _fresh(full: str) -> bool:
    """Missing, or written since this process began: a file that somebody in this run makes. About 2 us."""
    try:
        return os.stat(full).st_mtime >= _born[0] - 1.0
    except OSError:
        return True


def _kind(mode: str, flags: int) -> str:
    if "x" in mode or flags & os.O_EXCL:
        return "x"
    if "a" in mode or flags & os.O_APPEND:
        return "a"
    if "w" in mode or flags & os.O_TRUNC or (flags & os.O_CREAT and not flags & os.O_RDWR):
        return "w"
    return "+"


@quiet
def _note_open(full: str, kind: str) -> None:
    frame = sites.user_frame(sys._getframe(4))
    if frame is None:
        return
    key = (full + kind, frame.f_lineno)
    _opened[key] = _opened.get(key, 0) + 1
    if _opened[key] > MAX_SAME_OPEN or not _room("open"):
        return
    site = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    S.recorder.event("open", site, path=os.path.realpath(full), mode=kind, exists=os.path.exists(full), locks=_locks[0])
    if eventfiles.is_event_file(full):
        _look_at_event_files(full, kind)


def _look_at_event_files(full: str, kind: str) -> None:
    """Files of earlier writers in this folder; this one's own end is looked at when the process closes."""
    folder = os.path.dirname(full)
    if kind != "r":
        _event_files.setdefault(full, False)
    for name in sorted(os.listdir(folder) if os.path.isdir(folder) else [])[:64]:
        path = os.path.join(folder, name)
        if eventfiles.is_event_file(path) and path not in _event_files and not eventfiles.writer_lives(path):
            _judge_event_file(path)


def _judge_event_file(path: str) -> None:
    _event_files[path] = True
    torn = eventfiles.torn_at(path)
    if torn >= 0:
        S.recorder.event("event_file", path=os.path.realpath(path), torn_at=torn, size=os.path.getsize(path))


def finish() -> None:
    for path, told in list(_event_files.items()):
        if not told and os.path.exists(path):
            _judge_event_file(path)


@quiet
def _note_paths(kind: str, **paths: str) -> None:
    frame = sites.user_frame(sys._getframe(4))
    if frame is not None and _room(kind):
        site = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        S.recorder.event(kind, site, **{k: os.path.realpath(v) for k, v in paths.items()})


def _on_mkdir(path: Any, *_: Any) -> None:
    full = os.path.abspath(os.fsdecode(path))
    if not _boring(full):
        _note_paths("mkdir", path=full)


def _on_rmtree(path: Any, *_: Any) -> None:
    full = os.path.abspath(os.fsdecode(path))
    _tree[0] = os.path.join(full, "")
    _note_remove(full, "tree")


def _on_remove(path: Any, dir_fd: Any = -1, *_: Any) -> None:
    _on_one_removed(path, dir_fd, "file")


def _on_rmdir(path: Any, dir_fd: Any = -1, *_: Any) -> None:
    _on_one_removed(path, dir_fd, "dir")


def _on_one_removed(path: Any, dir_fd: Any, how: str) -> None:
    if dir_fd not in (-1, None) or _counts.get("remove", 0) >= MAX["remove"]:
        return  # rmtree goes down by descriptors
    full = os.path.abspath(os.fsdecode(path))
    if not _tree[0] or not os.path.join(full, "").startswith(_tree[0]):
        _note_remove(full, how)


_tree = [""]  # what rmtree was last called on: it removes the inside, and the folder itself, by these very calls


@quiet
def _note_remove(full: str, how: str) -> None:
    inner = sys._getframe(4)
    frame = sites.user_frame(inner)
    if frame is not None and not _boring(full) and not _by_tempfile(inner, frame) and _room("remove"):
        site = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        S.recorder.event("remove", site, path=os.path.realpath(full), how=how, exists=os.path.lexists(full), locks=_locks[0])


def _by_tempfile(inner: Any, outer: Any) -> bool:
    """The file by which `tempfile` tries a folder, wherever torch first asks for one. What the script itself cleans up through it is the script's."""
    while inner is not None and inner is not outer:
        if inner.f_code.co_name == "_get_default_tempdir" and inner.f_code.co_filename == TEMPFILE:
            return True
        inner = inner.f_back
    return False


def _on_rename(src: Any, dst: Any, *_: Any) -> None:
    full = os.path.abspath(os.fsdecode(dst))
    if not _boring(full):
        _note_paths("rename", src=os.path.abspath(os.fsdecode(src)), dst=full)


def _on_lock(*_: Any) -> None:
    _locks[0] += 1


_AUDITED: dict[str, Callable[..., None]] = {
    "open": _on_open,
    "os.mkdir": _on_mkdir,
    "os.rename": _on_rename,
    "shutil.rmtree": _on_rmtree,
    "os.remove": _on_remove,
    "os.rmdir": _on_rmdir,
    "fcntl.flock": _on_lock,
    "fcntl.lockf": _on_lock,
}


def _before_sleep(*_: Any, **__: Any) -> None:
    if _counts.get("sleep", 0) < MAX["sleep"] and sites.is_user_code(sys._getframe(3).f_code) and _room("sleep"):
        S.recorder.event("sleep", sites.here(4))


def arm() -> None:
    import logging

    _born[0] = time.time() - time.process_time()  # imports have run already; CPU time is the least that has passed
    wrap(builtins, "print", _print)
    before(time, "sleep", _before_sleep)
    after(logging.Logger, "callHandlers", _after_log)
    sys.addaudithook(_audit)
    at_close.append(quiet(finish))
