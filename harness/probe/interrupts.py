"""Exceptions that a signal handler of the script raises while the probe works: they are the script's, and go on to it.

torch's handler of SIGCHLD raises wherever the main thread happens to be ("DataLoader worker is killed by signal"). Taken for a failure of the
probe it was lost: the script went on, waiting for the dead worker until torch asked again, 5 s later.
"""

from __future__ import annotations

import functools
import signal
from types import CodeType, FrameType


def of_the_script(error: BaseException) -> bool:
    """Whether a signal handler stands in the traceback of `error`: one that is installed now, or one that is called as handlers are, and has taken
    itself away before it raised. Walked only once something was raised."""
    codes = _handlers()
    tb = error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code in codes or _is_called_as_one(tb.tb_frame):
            return True
        tb = tb.tb_next
    return False


def _is_called_as_one(frame: FrameType) -> bool:
    """With the number of a signal and the frame that it struck, which is the one below."""
    code = frame.f_code
    given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]][-2:]
    return len(given) == 2 and isinstance(given[0], int) and given[1] is not None and given[1] is frame.f_back


def _handlers() -> set[CodeType]:
    found = (_code(signal.getsignal(number)) for number in signal.valid_signals())
    return {code for code in found if code is not None}


def _code(handler: object) -> CodeType | None:
    """Of a function, a method, a functools.partial of one, or an object that is called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None) or getattr(vars(type(handler)).get("__call__"), "__code__", None)
    return code if isinstance(code, CodeType) else None
