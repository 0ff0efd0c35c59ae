"""This node's clock against that of the file system where the recordings lie."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable

from harness.doctor.line import OK, WARNING, Host, Line
from harness.doctor.run_folder import nearest

WHY = "the rank that failed first is told by time stamps; clocks that differ by more than the failure travels blame a victim"
TOLERATED_S = 0.5  # a local file system's stamps are those of the last tick, 4 ms


def look(host: Host) -> Iterable[Line]:
    try:
        before = time.time()
        with tempfile.TemporaryFile(dir=nearest(host.folder or host.cwd)) as file:
            file.write(b"x")
            file.flush()
            stamp = os.fstat(file.fileno()).st_mtime
        after = time.time()
    except OSError:
        return []  # the line of the run folder tells
    return [judge(before, stamp, after)]


def judge(before: float, stamp: float, after: float) -> Line:
    """The stamp was given between two looks at our clock."""
    skew_s = before - stamp if stamp < before else max(0.0, stamp - after)
    if skew_s <= TOLERATED_S:
        return Line("clock", OK, "agrees with the file system's", WHY)
    return Line("clock", WARNING, f"differs by {skew_s:.1f} s from that of the file system", WHY, "let chrony or ntpd set the clocks of all nodes")
