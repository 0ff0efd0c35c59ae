"""Reading a running frame's variables without keeping what they hold alive."""

from __future__ import annotations

import sys
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any


def let_go(frame: FrameType, variables: dict[str, Any]) -> None:
    """Before Python 3.13 a function's frame keeps the dict that reading f_locals made, and with it every tensor and graph that was in a
    variable then. It is emptied, unless the script holds it too (four references: the frame's, our caller's, ours, the call's)."""
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED and sys.getrefcount(variables) <= 4:
        code = frame.f_code
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            variables.pop(name, None)
