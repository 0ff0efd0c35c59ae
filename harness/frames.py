"""Which frames of a Python stack in a log or a traceback are the user's. In the rank the probe knows better (probe/sites.py)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from harness.model import Where

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


FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+) in (\S+)', re.MULTILINE)


def dumped(log: str) -> list[Where]:
    """The user's frames of the stack that faulthandler wrote last, innermost first: of the current thread, else of the first that has any."""
    return [f for f in dumped_whole(log) if is_users(f.file)]


def dumped_whole(log: str) -> list[Where]:
    """All frames of that stack, torch's among them."""
    at = log.rfind("Fatal Python error")
    if at < 0:
        return []
    blocks = sorted(re.split(r"\n\s*\n", log[at:]), key=lambda block: "Current thread" not in block)
    for block in blocks:
        found = [Where(file, int(line), function) for file, line, function in FRAME.findall(block)]
        if any(is_users(f.file) for f in found):
            return found
    return []
