"""Where a frame is, also one that stands between two lines."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from harness.probe import sites


def test_a_frame_of_another_thread_may_be_at_no_line() -> None:
    own = sys._getframe()
    between: Any = SimpleNamespace(f_code=own.f_code, f_lineno=None, f_lasti=own.f_lasti)
    assert sites.line(between) == own.f_code.co_firstlineno
    assert sites.line(own) > own.f_code.co_firstlineno
