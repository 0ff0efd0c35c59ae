"""Which frames of a Python stack in a log or a traceback are the user's. In the rank the probe knows better (probe/sites.py)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_HARNESS = Path(__file__).resolve().parent
SYSTEM = re.compile(r"site-packages|dist-packages|/lib/python\d|<frozen|_harness_probe|^<")


@cache
def _own_files() -> frozenset[str]:
    """Below `harness/`, the files that lie on a rank's stack. By name, because a recording may come from another installation, and a user's
    own project may have a harness/launch/ or harness/probe/ too."""
    return frozenset(str(p.relative_to(_HARNESS)) for folder in ("probe", "launch") for p in (_HARNESS / folder).rglob("*.py"))


def is_ours(file: str) -> bool:
    return file.startswith("<harness ") or "_harness_probe" in file or ("/harness/" in file and file.rpartition("/harness/")[2] in _own_files())


def is_users(file: str) -> bool:
    return bool(file) and not is_ours(file) and not SYSTEM.search(file)
