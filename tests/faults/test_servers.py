"""Warm servers that vanish between two runs: the next run has new ones, or the real torchrun, and never "could not launch"."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_cases import Case
from fault_stage import Stage

from harness.launch import proctable

PLAIN = Case("plain", "", "import os, torch\nopen('here' + os.environ['RANK'], 'w').write('1')\n", (), exit_code=0, bound_s=0)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def servers(stage: Stage) -> list[int]:
    return [p.pid for p in proctable.descendants(proctable.snapshot(), stage.supervisor.pid)]


def folder_of(pid: int) -> Path:
    """The folder with the sockets of all servers, from the command line of one."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return next(Path(os.fsdecode(word)).parents[1] for word in words if b"/harness-" in word and word.endswith((b"/0", b"/1")))


def test_servers_that_vanish_are_started_again(stage: Stage) -> None:
    assert stage.play(PLAIN).report["exit_code"] == 0
    first = servers(stage)
    shutil.rmtree(folder_of(first[0]))
    assert stage.play(PLAIN).report["exit_code"] == 0
    second = servers(stage)
    assert second and not set(first) & set(second)
    for pid in second:
        os.kill(pid, signal.SIGKILL)
    seen = stage.play(PLAIN)
    assert (seen.report["exit_code"], seen.report["ending"]["launcher_error"]) == (0, "")
