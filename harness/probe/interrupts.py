"""Exceptions that a signal handler of the script raises while the probe works: they are the script's, and go on to it.

torch's handler of SIGCHLD raises wherever the main thread happens to be ("DataLoader worker is killed by signal"). Taken for a failure of the
probe it was lost: the script went on, waiting for the dead worker until torch asked again, 5 s later.
"""

from __future__ import annotations

import signal
from types import CodeType


def of_the_script(error: BaseException) -> bool:
    """Whether a signal handler that is installed now stands in the traceback of `error`. Walked only once something was raised."""
    codes = _handlers()
    tb = error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code in codes:
            return True
        tb = tb.tb_next
    return False


def _handlers() -> set[CodeType]:
    found = (getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals())
    return {code for code in found if isinstance(code, CodeType)}
