"""The controller itself is struck: killed, interrupted, hung up on. The real command, one rank in the foreground, so that it costs a second."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness.launch import proctable
from harness.report import json as report_json

SCRIPT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
open("here", "w").close()
while True:
    time.sleep(0.05)
"""
HARNESS = str(Path(sys.executable).with_name("harness"))
RUN = [HARNESS, "run", "train.py", "--launcher", "inline", "--grace", "1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not in {timeout_s} s: {what}"
        time.sleep(0.02)


def stored(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / ".harness" / "latest" / "report.json").read_text())
    jsonschema.validate(document, json.loads(report_json.SCHEMA_FILE.read_text()))
    return document


def nothing_left(document: dict[str, Any]) -> None:
    until(lambda: not proctable.marked(proctable.snapshot(), document["run_id"]), "nothing of the run lives", 10.0)


def started(folder: Path, **streams: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(RUN, cwd=folder, text=True, **streams)
    until(lambda: (folder / "here").exists() or process.poll() is not None, "the script runs")
    assert process.poll() is None
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_ends_the_run_within_the_grace(folder: Path, number: signal.Signals, code: int) -> None:
    process = started(folder, stdout=subprocess.DEVNULL)
    process.send_signal(number)
    begun = time.monotonic()
    assert process.wait(30) == code
    assert time.monotonic() - begun < 10.0
    document = stored(folder)
    assert (document["status"], document["exit_code"], document["ending"]["reason"], document["ending"]["left_behind"]) == ("done", code, "interrupted", [])
    nothing_left(document)


def test_a_closed_terminal(folder: Path) -> None:
    """The session leader of a terminal that goes away gets SIGHUP, and nothing that it writes arrives."""
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execv(HARNESS, RUN)
    until(lambda: (folder / "here").exists(), "the script runs")
    os.close(master)
    until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, "the controller ends", 30.0)
    document = stored(folder)
    assert (document["status"], document["exit_code"]) == ("done", 143)
    nothing_left(document)


def test_a_killed_controller_is_finished_by_report(folder: Path) -> None:
    process = started(folder, stdout=subprocess.DEVNULL)
    process.kill()
    process.wait()
    document = stored(folder)
    assert document["status"] == "running"  # valid, and says so
    nothing_left(document)
    narrowed = subprocess.run([HARNESS, "report", "--select", "SYN"], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert "the controller of this run was killed" in narrowed.stdout
    document = stored(folder)
    assert document["status"] == "recovered" and narrowed.returncode == document["exit_code"] != 0
    assert {c["code"] for c in document["checks"] if c["outcome"] == "deselected"} == set(), "what is stored was not narrowed"
    assert stored(folder) == document


def test_a_live_run_can_be_asked_for_its_stacks_and_a_dead_one_cannot(folder: Path) -> None:
    process = started(folder, stdout=subprocess.DEVNULL)
    asked = subprocess.run([HARNESS, "stacks", "--format", "json"], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert asked.returncode == 0 and json.loads(asked.stdout)["kind"] == "stacks"
    process.send_signal(signal.SIGINT)
    process.wait(30)
    late = subprocess.run([HARNESS, "stacks"], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert late.returncode == 2 and "has ended" in late.stderr


def test_the_run_folder_is_private(folder: Path) -> None:
    process = started(folder, stdout=subprocess.DEVNULL)
    run = (folder / ".harness" / "latest").resolve()
    modes = {path: path.stat().st_mode & 0o077 for path in (run, *run.rglob("*")) if not path.is_symlink()}
    process.send_signal(signal.SIGINT)
    process.wait(30)
    assert {path.name for path, mode in modes.items() if mode and path.is_dir()} == set()
    assert modes[run] == 0
