"""What may not be read, entered or stood in is one line with the fix and exit code 2, never a traceback: the command itself, by a user without rights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Harness = Callable[..., str]
WITHOUT_RIGHTS = "-dac_override,-dac_read_search"  # what makes root read everything


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """Runs the command in `tmp_path`; the one line it says, after exit code 2."""
    drop = ["setpriv", f"--bounding-set={WITHOUT_RIGHTS}", f"--inh-caps={WITHOUT_RIGHTS}"] if os.geteuid() == 0 else []
    if drop and shutil.which("setpriv") is None:
        pytest.skip("root reads everything, and setpriv is not here to take that away")
    locked: list[Path] = []

    def run(*arguments: str, without: Path | None = None) -> str:
        if without is not None:
            without.chmod(0)
            locked.append(without)
        done = subprocess.run(
            [*drop, sys.executable, "-m", "harness", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stdout + done.stderr
        return done.stderr.removeprefix("harness: error: ").strip()

    yield run
    for path in locked:
        path.chmod(0o700)


def test_scripts_and_run_folders_behind_a_locked_door(harness: Harness, tmp_path: Path) -> None:
    inner = tmp_path / "locked"
    inner.mkdir()
    (inner / "train.py").write_text("import torch\n")
    said = harness("run", "locked/train.py", without=inner)
    assert said == f"script locked/train.py lies in a folder that may not be entered; chmod u+x {inner}"
    assert harness("config", "locked/train.py") == said
    assert "matches no scenario and no script" in harness("run", "locked/*.py")
    assert "permission denied; name another run folder" in harness("report", "locked/run")
    assert "is not writable (permission denied); name another folder" in harness("run", "ddp_cifar", "--out", "locked/run")


def test_a_script_a_pyproject_and_data_that_may_not_be_read(harness: Harness, tmp_path: Path) -> None:
    script, settings = tmp_path / "train.py", tmp_path / "pyproject.toml"
    script.write_text("import torch\n")
    assert harness("run", "train.py", without=script) == f"script {script} is not readable; chmod u+r {script}"
    for part in ("train", "test"):
        (tmp_path / "data" / part / "cat").mkdir(parents=True)
    folder = tmp_path / "data" / "test"
    assert harness("run", "ddp_cifar", "--data", "data", without=folder) == f"data folder {folder} cannot be read: permission denied; chmod it"
    settings.write_text("[tool.harness]\n")
    assert harness("config", without=settings) == f"{settings} cannot be read: permission denied; chmod u+r {settings}"


def test_a_folder_that_was_removed_under_our_feet(tmp_path: Path) -> None:
    for verb in (["run", "ddp_cifar"], ["config"], ["report"]):
        gone = tmp_path / "gone"
        gone.mkdir()
        enter_and_remove = f'cd "{gone}" && rmdir "{gone}" && exec "{sys.executable}" -P -m harness {" ".join(verb)}'
        done = subprocess.run(["sh", "-c", enter_and_remove], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (2, "harness: error: the folder you stand in was removed; cd into one that exists\n")
