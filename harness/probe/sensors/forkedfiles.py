"""Open files that the script's own forked processes share: each seeks and reads in them, see sharedfiles.py; the workers of loaders: loader.py.

Event "file_shared" (in the child, at its end): name (attributes that lead to it; "" where it was given bare), key (descriptor and inode, alike in all
children of one parent), made (the line that opens it). Looked at are the first 200,000 calls of a child that was given an open file, none of another.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .. import closures, sharedfiles, sites
from ..arm import at_close, on_import
from ..patching import quiet, wrap
from ..state import S
from . import shared

MAX_CALLS = 200_000
_given: list[sharedfiles.Held] = []  # to the child that is being started: it inherits the list
_end: list[Callable[[], None]] = []


def _start(original: Any) -> Any:
    look = quiet(_before_start)

    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        look(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            _given.clear()

    return start


def _before_start(process: Any) -> None:
    if shared._is_loader(process) or shared._method(process) != "fork":
        return
    roots = [getattr(process, "_args", ()), getattr(process, "_kwargs", {}), getattr(process, "_target", None), dict(vars(process)), type(process).run]
    found: dict[int, sharedfiles.Held] = {}
    for thing in closures.reach(roots, sharedfiles.FILES[0]):
        bare = sharedfiles.held(thing, ()) if isinstance(thing, sharedfiles.FILES) else None
        for one in [bare] if bare is not None else sharedfiles.direct(thing):
            if one.chain or one.fd not in found:  # with a name rather than without
                found[one.fd] = one
    _given[:] = list(found.values())[: sharedfiles.MAX_FILES]


def _bootstrap(original: Any) -> Any:
    begin = quiet(_begin)

    def bootstrap(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin()
        return original(self, *args, **kwargs)

    return bootstrap


def _begin() -> None:
    files = list(_given)
    if files:
        _end[:] = [sharedfiles.watch(files, lambda at, flags: _tell(files[at], flags), MAX_CALLS)]


def _tell(file: sharedfiles.Held, flags: int) -> None:
    if sharedfiles.races(flags) and S.recorder.role == "child":
        made = file.made
        key = f"{file.fd}-{file.node[0]}-{file.node[1]}-{os.getppid()}"
        S.recorder.event("file_shared", name=file.name, key=key, made=sites.as_json(made) if made is not None else None)


def _finish() -> None:
    while _end:
        _end.pop()()


def _processes(module: Any) -> None:
    wrap(module.BaseProcess, "start", _start)
    wrap(module.BaseProcess, "_bootstrap", _bootstrap)


def arm() -> None:
    on_import("multiprocessing.process", _processes)
    at_close.append(quiet(_finish))
