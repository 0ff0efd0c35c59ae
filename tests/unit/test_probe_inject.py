"""A fresh interpreter of a run: the probe comes in by sitecustomize, and the user's own sitecustomize, which ours shadows, runs all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import harness

PROBE_DIR = Path(harness.__file__).parent / "probe"
LOOK = "import sys; print(sys.modules['sitecustomize'].MINE, '_harness_probe_bootstrap' in sys.modules or '_harness_probe' in sys.modules)"


def started(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text("MINE = 'the one of the user'\n")
    path = os.pathsep.join((str(PROBE_DIR / "inject"), str(tmp_path)))
    look = f"{LOOK}; print([p for p in sys.path if p.endswith('inject')])"
    return subprocess.run(
        [sys.executable, "-c", look], env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_users_own_sitecustomize_runs_and_ours_is_not_seen(tmp_path: Path) -> None:
    marks = {"_HARNESS_PROBE_DIR": str(PROBE_DIR), "_HARNESS_RUN_DIR": str(tmp_path / "run"), "_HARNESS_RUN_ID": "r"}
    done = started(tmp_path, **marks)
    assert (done.stdout.splitlines(), done.stderr) == (["the one of the user True", "[]"], "")


def test_a_probe_that_cannot_start_is_no_harm(tmp_path: Path) -> None:
    done = started(tmp_path, _HARNESS_PROBE_DIR=str(tmp_path / "nowhere"), _HARNESS_RUN_DIR=str(tmp_path / "run"))
    assert (done.stdout.splitlines(), done.stderr) == (["the one of the user False", "[]"], "")
