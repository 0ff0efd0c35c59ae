"""Which of several numbered files is the newest."""

from __future__ import annotations

import os
from pathlib import Path

from harness.probe import siblings


def written(folder: Path, *names: str) -> None:
    for age, name in enumerate(names):
        (folder / name).write_text("x")
        os.utime(folder / name, ns=(10**18 + age, 10**18 + age))


def test_sorted_as_text(tmp_path: Path) -> None:
    written(tmp_path, "iter-40.pt", "iter-80.pt", "iter-120.pt", "iter-999.log")
    assert siblings.newest(str(tmp_path / "iter-80.pt")) == "iter-120.pt"
    assert siblings.newest(str(tmp_path / "iter-120.pt")) == ""
    assert siblings.newest(str(tmp_path / "iter-40.pt")) == ""  # an earlier one, on purpose


def test_what_is_no_fault(tmp_path: Path) -> None:
    written(tmp_path, "iter-040.pt", "iter-120.pt", "last.pt", "e9.pt")
    assert siblings.newest(str(tmp_path / "iter-120.pt")) == ""
    assert siblings.newest(str(tmp_path / "last.pt")) == ""
    assert siblings.newest(str(tmp_path / "gone-1.pt")) == ""
    assert siblings.newest("") == ""
    written(tmp_path, "e10.pt", "e9.pt")  # the lower number was written last: an old run's files are left
    assert siblings.newest(str(tmp_path / "e9.pt")) == ""
