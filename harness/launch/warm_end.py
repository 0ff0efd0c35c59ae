"""How a forked rank ends: as a fresh interpreter does up to where nobody could tell any more, and without taking torch apart.

What the script can see comes as ever and in its order: threads, atexit handlers, the script's own modules with all that they hold, process
groups, destructors of libraries that the script itself loaded, C streams. Left out is what a preloaded interpreter pays for and nobody hears:
each page that is touched on the way is a copy, since it is shared with the server. Loaded by warm_server.py before anything of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import weakref

NOT_SPARED = ("__main__", "__mp_main__", "builtins", "sys", "torch.distributed.distributed_c10d")  # the last holds the process groups
CLEARED = "cpython.PyInterpreterState_Clear"  # the audit event between the end of the modules and that of the interpreter
_libc = ctypes.CDLL(None)
_leave = ctypes.PyDLL(None).exit  # keeps the GIL: destructors of libraries that were loaded later drop objects of Python's
_preloaded: list[str] = []
_is_success = [False]


def note_preloaded() -> None:
    """In the server, after imports: what ranks need not take apart. Listing it in the rank would copy a page for nearly every name."""
    _preloaded[:] = [name for name in sys.modules if name not in NOT_SPARED]
    _spare_finalizers()


def _spare_finalizers() -> None:
    """At exit torch takes its own operators out of the dispatcher, one by one (weakref.finalize): 5,000 copied pages."""
    for info in vars(weakref.finalize).get("_registry", {}).values():
        if str(getattr(info.func, "__module__", "")).startswith("torch."):
            info.atexit = False


def leave_at_once() -> None:
    """In the rank, before the script: when exit() has come to what was loaded before the fork, the process ends: 0.5 s of CPU a rank for libtorch's
    static destructors, which unregister operators one by one. All of Python's own end comes before that, and so do the destructors of libraries
    that the script itself loads. C streams are flushed as exit() would."""
    if hasattr(_libc, "on_exit") and hasattr(_libc, "__cxa_atexit"):  # glibc; handlers run in reverse order
        _libc.on_exit(ctypes.cast(_libc._exit, ctypes.c_void_p), None)  # is given the exit status
        getattr(_libc, "__cxa_atexit")(ctypes.cast(_libc.fflush, ctypes.c_void_p), None, None)


def expect(code: object) -> None:
    """The script has come to its end, or called sys.exit(code). Only of a success is it sure how the process has to end."""
    _is_success[0] = code is None or (isinstance(code, int) and not code)


def spare_preloaded() -> None:
    """The last atexit handler of a rank: what was loaded before the fork is not taken apart module by module, which would copy 150 MB of pages
    and cost 0.3 s of CPU a rank."""
    for name in _preloaded:
        if (module := sys.modules.pop(name, None)) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
    if _is_success[0] and _flushed():
        with contextlib.suppress(RuntimeError):  # a hook of the script's forbids it
            sys.addaudithook(_on_audit)


def _flushed() -> bool:
    """Whether the streams took all: else the interpreter's exit code is 120."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except Exception:
        return False
    return True


def _on_audit(event: str, _arguments: object) -> None:
    """The modules are gone. What follows frees the interpreter's own tables: 5,000 copied pages, more than half of them for its strings."""
    if event == CLEARED:
        _leave(0)
