"""Files that differ from one in the numbers of their names only."""

from __future__ import annotations

import os
import re
from itertools import islice

MAX_ENTRIES = 2000  # of a folder; about 1 ms
_DIGITS = re.compile(r"\d+")


def newest(path: str) -> str:
    """The name of the one with the highest number, where that was written no earlier than `path`, and `path` is the last in the order of
    letters; else "".
    """
    folder, name = os.path.split(path)
    if not _DIGITS.search(name):
        return ""
    try:
        with os.scandir(folder) as entries:
            alike = [e.name for e in islice(entries, MAX_ENTRIES) if _DIGITS.sub("#", e.name) == _DIGITS.sub("#", name)]
        last = max(alike, key=_numbers, default=name)
        if last == name or max(alike) != name or _numbers(last) == _numbers(name):
            return ""
        return last if os.stat(os.path.join(folder, last)).st_mtime_ns >= os.stat(path).st_mtime_ns else ""
    except OSError:
        return ""


def _numbers(name: str) -> list[int]:
    return [int(n) for n in _DIGITS.findall(name)]
