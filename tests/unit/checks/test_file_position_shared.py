"""DAT126: loader workers, and processes of the script's own, that read in one open file."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checks.dat.file_position_shared import FilePositionShared
from harness.model import Severity
from harness.record import Run
from tests.unit.checks.builder import event, findings, recording, row, run, site


def workers(file: dict[str, Any] | None, num: int = 2) -> Run:
    opened = event("loader", line=50, loop=0, num_workers=num, made_dataset=[site(40, "data = Clips(path)")])
    events = [opened, event("pass", line=50, loop=0, file=file)]
    return run([recording(events, [row(s) for s in range(4)], rank=r) for r in range(2)])


def test_workers_of_a_loader() -> None:
    (found,) = findings(FilePositionShared, workers({"name": "pack", "workers": 2, "site": site(38, "self.pack = open(path)")}))
    assert (found.severity, found.where and found.where.line, found.ranks) == (Severity.ERROR, 38, (0, 1))
    assert "2 loader workers read in one open file, `pack`" in found.message
    (found,) = findings(FilePositionShared, workers({"name": "pack", "workers": 2, "site": None}))
    assert found.where and found.where.line == 40
    assert findings(FilePositionShared, workers(None)) == []


S = 1_000_000_000


def children(*lives: tuple[int, int], keys: tuple[str, str] = ("5-1-2-900", "5-1-2-900")) -> Run:
    """Processes of one parent, by the seconds at which they began and ended."""
    own = [
        recording([event("file_shared", t=end * S - 1, name="f", key=key, made=site(9)), event("end", t=end * S)], pid=2000 + i, ppid=1000, role="child")
        for i, ((begin, end), key) in enumerate(zip(lives, keys, strict=True))
    ]
    for process, (begin, _) in zip(own, lives, strict=True):
        process.events[0] = event("start", t=begin * S, **{k: v for k, v in process.start.items() if k not in ("k", "t", "s", "y")})
        process.__dict__.pop("_by_kind", None)
    return run([recording([]), *own])


def test_processes_of_the_script() -> None:
    (found,) = findings(FilePositionShared, children((10, 20), (11, 19)))
    assert found.where and found.where.line == 9 and "2 forked processes read in one open file, `f`" in found.message


@pytest.mark.parametrize("healthy", [children((10, 20), (21, 30)), children((10, 20), (11, 19), keys=("5-1-2-900", "5-1-3-900"))], ids=["in turn", "two files"])
def test_processes_with_a_file_each(healthy: Run) -> None:
    assert findings(FilePositionShared, healthy) == []
