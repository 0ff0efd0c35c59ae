"""Writes a process's own failure where it is raised, before any clean-up: torchrun's "root cause" names the victim in most runs in which
the failing rank tears its group down.

Event "failure": type, message, frames (user frames, innermost first), trace, inner (function that raised), thread, phase, op, cause,
offender (range of the indices in torch's embedding and losses, where one of those raised), left_behind (see attributes.py), ways (of
a forward of DDP, see conditions.py), consumer (in a collective, see generators.py); `site` is the innermost user frame.
Event "exit_call": code, how; sys.exit() with anything but success (argparse ends so), a SystemExit that reached the end of the script,
os._exit() with any code.
Event "kill_call": pid, signal; the script sends a signal that ends a process, itself or another one.
Event "local_rank_argument": option, default; the script declares the argument that the launcher of old passed.
A process that dies by a signal leaves its python stack in its output, by faulthandler; one that the user has enabled stays as it is.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Any

from . import attributes, conditions, generators, interrupts, protocol, sites
from .state import S

_seen: set[tuple[int, str, str]] = set()  # ids alone are used again once an exception is gone
MAX_FAILURES = 200


def record(error: BaseException, tb: TracebackType | None = None, thread: str = "main") -> None:
    """One failure event an exception object; never raises."""
    try:
        key = (id(error), type(error).__name__, _text(error, 200))
        if isinstance(error, (SystemExit, GeneratorExit)) or key in _seen or S.recorder.disabled or len(_seen) >= MAX_FAILURES:
            return
        _seen.add(key)
        S.recorder.fallen += thread != "main"
        try:
            _write(error, tb or error.__traceback__, thread)
        except Exception as second:
            if not interrupts.of_the_script(second):
                raise
            _write(error, tb or error.__traceback__, thread)  # a dead loader worker breaks a pipe first, and its SIGCHLD comes while that is written
    except Exception:
        S.recorder.errors += 1


def _write(error: BaseException, tb: TracebackType | None, thread: str) -> None:
    frames = traceback.extract_tb(tb)
    user = [f for f in reversed(frames) if sites.is_user_file(f.filename)]
    places = [(f.filename, f.lineno or 0, f.name) for f in user[:8]]
    if isinstance(error, SyntaxError) and error.filename and sites.is_user_file(error.filename):
        places.insert(0, (error.filename, error.lineno or 0, "<module>"))
    cause = error.__cause__ or error.__context__
    S.recorder.event(
        protocol.FAILURE,
        places[0] if places else None,
        type=type(error).__name__,
        message=_text(error, 4000),
        frames=[sites.as_json(p) for p in places],
        trace=_trace(error, tb),
        inner=_innermost(frames),
        thread=thread,
        phase=S.recorder._phase.decode(),
        op=S.recorder._op.decode(),
        cause=_shown(cause, 500) if cause is not None else "",
        offender=_offender(tb) if isinstance(error, (IndexError, RuntimeError)) else None,
        left_behind=attributes.left_behind(str(error), tb) if isinstance(error, RuntimeError) else None,
        ways=conditions.before(places)["ways"] if S.recorder._op == b"ddp_forward" else None,
        consumer=generators.consumer(places) if S.recorder._op else None,
    )


def _innermost(frames: traceback.StackSummary) -> str:
    """The function that raised, but for the one by which torch calls every operation."""
    frame = next((f for f in reversed(frames) if not f.filename.endswith("torch/_ops.py")), None)
    return "" if frame is None else protocol.WAITING if frame.filename.endswith(protocol.WAITING_FILE) else frame.name


def _text(value: object, limit: int) -> str:
    """str() of an object of the user's, which may raise."""
    try:
        return str(value)[:limit]
    except Exception as error:
        return f"<{type(value).__name__} whose str() raised {type(error).__name__}>"


def _shown(value: object, limit: int) -> str:
    try:
        return repr(value)[:limit]
    except Exception as error:
        return f"<{type(value).__name__} whose repr() raised {type(error).__name__}>"


def _trace(error: BaseException, tb: TracebackType | None) -> str:
    """The traceback as Python prints it, without our own frames: only here is it known for sure which those are."""
    try:
        whole = traceback.TracebackException(type(error), error, tb)
        _leave_out_ours(whole, set())
        return "".join(whole.format())[-6000:]
    except Exception:  # a str() of the user's that raises
        return "".join(traceback.format_tb(tb))[-6000:]


def _leave_out_ours(whole: traceback.TracebackException | None, seen: set[int]) -> None:
    if whole is None or id(whole) in seen:
        return
    seen.add(id(whole))
    whole.stack[:] = [frame for frame in whole.stack if not sites.is_ours(frame.filename)]
    _leave_out_ours(whole.__cause__, seen)
    _leave_out_ours(whole.__context__, seen)


INDEXED = {
    "embedding": ("input", "weight", 0),
    "cross_entropy": ("target", "input", 1),
    "nll_loss": ("target", "input", 1),
}  # indices, what they index, dimension


def _offender(tb: TracebackType | None) -> dict[str, Any] | None:
    """Range of the indices in the innermost call of torch's that takes some; CPU tensors only.

    The frames of a traceback are over: reading their locals changes nothing.
    """
    found: dict[str, Any] | None = None
    while tb is not None:
        frame = tb.tb_frame
        known = INDEXED.get(frame.f_code.co_name) if frame.f_code.co_filename.endswith("functional.py") else None
        if known is not None:
            indices: Any = frame.f_locals.get(known[0])
            table: Any = frame.f_locals.get(known[1])
            if hasattr(indices, "numel") and indices.device.type == "cpu" and indices.numel() and not indices.is_floating_point():
                limit = table.shape[min(known[2], table.dim() - 1)] if hasattr(table, "dim") and table.dim() else None
                found = {"function": frame.f_code.co_name, "smallest": int(indices.min()), "largest": int(indices.max()), "limit": limit}
        tb = tb.tb_next
    return found


def record_in_flight() -> None:
    """An exception that is on its way through a `finally` block, e.g. while it tears the process group down."""
    error = sys.exc_info()[1]
    if error is not None:
        record(error)


def arm() -> None:
    _arm_hooks()
    _arm_exit()
    _arm_kills()
    _arm_exec()
    _arm_faults()
    from .arm import at_close, on_import

    at_close.append(record_last)
    on_import("argparse", _arm_arguments)
    on_import("multiprocessing.process", _arm_processes)
    on_import("torch.multiprocessing.spawn", _arm_spawn)


def _arm_hooks() -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> Any:
        record(error, tb)
        return previous(kind, error, tb)

    sys.excepthook = hook
    previous_thread = threading.excepthook

    def thread_hook(args: Any) -> Any:
        if args.exc_value is not None:
            record(args.exc_value, args.exc_traceback, thread=getattr(args.thread, "name", "thread"))
        return previous_thread(args)

    threading.excepthook = thread_hook


def record_last() -> None:
    """The exception that ended the main thread, where a hook of the user's own (rich, IPython) stands in the place of ours."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        record(error, getattr(sys, "last_traceback", None))


def _arm_faults() -> None:
    import faulthandler

    try:
        if not faulthandler.is_enabled():
            faulthandler.enable()
    except (RuntimeError, ValueError, OSError, AttributeError):  # no usable stderr
        S.recorder.errors += 1


def _arm_arguments(module: Any) -> None:
    add = module._ActionsContainer.add_argument

    def add_argument(self: Any, *names: Any, **kwargs: Any) -> Any:
        option = next((n for n in names if isinstance(n, str) and n in ("--local_rank", "--local-rank")), None)
        if option is not None:
            default = kwargs.get("default")
            shown = default if isinstance(default, int) else _shown(default, 80)
            S.recorder.event("local_rank_argument", sites.here(2), option=option, default=shown)
        return add(self, *names, **kwargs)

    add_argument.__doc__ = add.__doc__
    module._ActionsContainer.add_argument = add_argument


def _arm_exit() -> None:
    leave, raise_exit = os._exit, sys.exit

    def exit(status: Any = None, /) -> Any:
        record_exit(status, sites.here(2), "sys.exit")
        raise_exit(status)

    exit.__doc__ = raise_exit.__doc__
    sys.exit = exit

    def _exit(status: int) -> None:
        from .arm import close

        try:
            if isinstance(status, int):
                S.recorder.event("exit_call", sites.here(2), code=status, how="os._exit")
            close("os._exit", status)
        finally:
            leave(status)

    _exit.__doc__ = leave.__doc__
    os._exit = _exit  # type: ignore[assignment]


def record_exit(status: object, site: sites.Site | None, how: str) -> None:
    """An end that is not a success. What the user exits with may be any object, so it is compared by identity and type only."""
    if status is None or (isinstance(status, int) and not status) or S.recorder.disabled:
        return
    S.recorder.event("exit_call", site, code=status if isinstance(status, int) else _text(status, 500), how=how)


def record_system_exit(error: SystemExit) -> None:
    """A SystemExit that reached the end of the script; one by sys.exit() has told itself already."""
    try:
        user = [f for f in traceback.extract_tb(error.__traceback__) if sites.is_user_file(f.filename)]
        if user:
            record_exit(error.code, (user[-1].filename, user[-1].lineno or 0, user[-1].name), "SystemExit")
    except Exception:
        S.recorder.errors += 1


def _arm_exec() -> None:
    """Event "exec": file. Another program takes this process over; where it is a Python that reads PYTHONPATH, it makes a recording of its own."""

    def telling(original: Any) -> Any:
        def replaced(*args: Any, **named: Any) -> None:
            if not S.recorder.disabled:
                S.recorder.event("exec", sites.here(2), file=args[0] if args and isinstance(args[0], str) else "")
            original(*args, **named)

        replaced.__name__ = replaced.__qualname__ = original.__name__
        return replaced

    os.execv, os.execve = telling(os.execv), telling(os.execve)  # all others of the family come to these two


FATAL = {1, 2, 3, 4, 6, 7, 8, 9, 11, 15, 24, 31}  # signals that end a process unless it handles them


def _arm_kills() -> None:
    """Who kills whom from within the script: the kernel does not tell the sender of a SIGKILL."""
    import signal

    kill, kill_group, raise_signal = os.kill, os.killpg, signal.raise_signal

    def note(pid: Any, number: Any) -> None:
        if isinstance(pid, int) and isinstance(number, int) and number in FATAL:
            S.recorder.event("kill_call", sites.here(3), pid=int(pid), signal=int(number))

    def patched_kill(pid: int, sig: int, /) -> None:
        note(pid, sig)
        kill(pid, sig)

    def patched_killpg(pgid: int, sig: int, /) -> None:
        note(pgid, sig)
        kill_group(pgid, sig)

    def patched_raise(sig: int, /) -> None:
        note(os.getpid(), sig)
        raise_signal(sig)

    for name, module, patched, original in (
        ("kill", os, patched_kill, kill), ("killpg", os, patched_killpg, kill_group), ("raise_signal", signal, patched_raise, raise_signal),
    ):  # fmt: skip
        patched.__name__ = patched.__qualname__ = name
        patched.__doc__, patched.__module__ = original.__doc__, original.__module__
        setattr(module, name, patched)


def _arm_processes(module: Any) -> None:
    """Data loader workers stay silent; other children of the script record themselves and their failures."""
    process = module.BaseProcess
    bootstrap, run = process._bootstrap, process.run

    def _bootstrap(self: Any, *args: Any, **kwargs: Any) -> Any:
        target = getattr(self, "_target", None)
        if getattr(target, "__name__", "") == "_worker_loop" or "utils.data" in (getattr(target, "__module__", "") or ""):
            S.recorder.disabled = True
        elif "torch" in sys.modules:
            from .sensors import beat

            beat.start()
        code = bootstrap(self, *args, **kwargs)
        from .arm import close

        close("exit", code if isinstance(code, int) else None)
        return code

    def wrapped_run(self: Any) -> Any:
        try:
            return run(self)
        except BaseException as error:
            record(error)
            raise

    process._bootstrap = _bootstrap
    process.run = wrapped_run


class Recorded:
    """A picklable stand-in for the function given to mp.spawn, which swallows exceptions into a queue."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        try:
            return self.function(*args)
        except BaseException as error:
            record(error)
            raise


def _arm_spawn(module: Any) -> None:
    inner = module._wrap

    def _wrap(fn: Any, *args: Any) -> Any:
        return inner(Recorded(fn), *args)

    _wrap.__module__, _wrap.__qualname__, _wrap.__name__ = inner.__module__, inner.__qualname__, inner.__name__
    module._wrap = _wrap
