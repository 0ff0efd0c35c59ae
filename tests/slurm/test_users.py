"""Two users' runs at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import Cluster
from test_core import TASKS

pytestmark = pytest.mark.timeout(300)
NOBODY = 65534


def second_user() -> int | None:
    """Another user, where one can run this Python; else None: two runs of one user."""
    try:
        tried = subprocess.run([sys.executable, "-c", "import harness"], user=NOBODY, capture_output=True, cwd="/")
    except OSError:
        return None
    return NOBODY if tried.returncode == 0 else None


def test_two_users_side_by_side(cluster: Cluster, desk: Path) -> None:
    """The same script at once, each in a folder of its own: ports, folders and names do not meet, and neither can read the other's."""
    user = second_user()
    owner = os.getuid() if user is None else user
    other = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        shutil.copy(desk / "quick.py", other / "quick.py")
        os.chown(other, owner, owner)
        first, second = cluster.start(desk, "run", "quick.py", *TASKS), cluster.start(other, "run", "quick.py", *TASKS, user=user, HOME=str(other))
        for run in (first, second):
            code, text = run.end(240)
            assert code == 5, text  # no torch, so nothing can be checked
        for folder in (desk, other):
            assert (folder / ".harness" / "latest" / "logs" / "rank1.log").read_text().startswith("out 1 ")
        run_dir = (other / ".harness" / "latest").resolve()
        assert {path.stat().st_uid for path in run_dir.rglob("*")} == {owner}
        assert run_dir.stat().st_mode & 0o077 == 0
    finally:
        shutil.rmtree(other)
