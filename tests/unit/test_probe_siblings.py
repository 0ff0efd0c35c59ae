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


def test_a_script_that_sorts_names(tmp_path: Path) -> None:
    def sorts(source: str) -> bool:
        path = tmp_path / f"resume{abs(hash(source))}.py"
        path.write_text(source)
        return siblings.sorts(str(path))

    assert sorts("def latest(d):\n    paths = list(d.glob('*.pt'))\n    return sorted(paths)[-1]\n")
    assert sorts("import os\nlast = max(os.listdir('out'))\n")
    assert not sorts("def latest(d):\n    return max(d.glob('*.pt'), key=number)\n")
    assert not sorts("def best(scores):\n    return torch.load(f'epoch-{max(range(9))}.pt')\n")  # chosen by a number
    assert not sorts("def clean(d):\n    for old in sorted(d.glob('*.pt'))[:-3]:\n        old.unlink()\n")
