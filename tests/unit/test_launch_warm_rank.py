"""What must hold before a server may fork, and what a forked child puts right."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.launch import warm_rank


def test_one_thread_may_fork() -> None:
    assert subprocess.run([sys.executable, "-c", "from harness.launch import warm_rank; print(repr(warm_rank.unsafe_to_fork()))"],
                          capture_output=True, text=True, check=True).stdout == "''\n"  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # python 3.12 warns of a fork with threads: that is the point here
def test_two_threads_may_not() -> None:
    done = threading.Event()
    waiting = threading.Thread(target=done.wait)
    waiting.start()
    try:
        assert warm_rank.unsafe_to_fork().endswith("threads run after the imports")
    finally:
        done.set()
        waiting.join()


def test_an_open_gpu_may_not() -> None:
    """In an interpreter of its own: torch has threads of its own here by now."""
    code = "import os; from harness.launch import warm_rank; os.readlink = lambda path: '/dev/nvidia0'; print(warm_rank.unsafe_to_fork())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "a GPU was opened by the imports\n"


def test_the_mark_of_the_run_stands_in_environ(tmp_path: Path) -> None:
    code = """
import os
from harness.launch import warm_rank
task = warm_rank.Task(["x.py"], "/", {"_HARNESS_RUN_ID": "run-7", "A": "1"}, [], os.getppid())
warm_rank._take_environment(task)
print(b"_HARNESS_RUN_ID=run-7" in open("/proc/self/environ", "rb").read().split(b"\\0"), sorted(os.environ), os.getcwd())
"""
    env = {"_HARNESS_RUN_ID": "-" * 64, "OLD": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
    assert out == "True ['A', '_HARNESS_RUN_ID'] /\n"
