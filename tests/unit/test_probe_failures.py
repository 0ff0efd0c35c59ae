"""What a rank writes of its own failure, whatever the user's objects do when they are printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.launch.command import PROBE_DIR
from harness.probe import protocol

# A fresh interpreter, armed as a rank is, without torch: 0.2 s.
ARM = """
import os, sys
os.environ["_HARNESS_RUN_DIR"] = {run!r}
sys.path.insert(0, {probe!r})
import bootstrap
bootstrap.arm_from_environment()
sys.path.pop(0)
exec(compile(open({script!r}).read(), {script!r}, "exec"), {{"__name__": "__main__"}})
"""


def events(tmp_path: Path, script: str, kind: str) -> list[dict[str, Any]]:
    """Events of this kind that the script leaves behind."""
    (tmp_path / "train.py").write_text(script)
    code = ARM.format(run=str(tmp_path / "run"), probe=str(PROBE_DIR), script=str(tmp_path / "train.py"))
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False, cwd=tmp_path)
    lines = [line for path in (tmp_path / "run" / protocol.REC_DIR).glob("*.jsonl") for line in path.read_text().splitlines()]
    return [e for e in map(json.loads, lines) if e["k"] == kind]


@pytest.mark.parametrize(
    ("script", "code", "how"),
    [
        ("import sys\nsys.exit(3)\n", 3, "sys.exit"),
        ("import sys\nsys.exit('no data')\n", "no data", "sys.exit"),
        ("import os\nos._exit(7)\n", 7, "os._exit"),
        ("import os\nos._exit(0)\n", 0, "os._exit"),
    ],
)
def test_exits(tmp_path: Path, script: str, code: Any, how: str) -> None:
    (call,) = events(tmp_path, script, "exit_call")
    assert (call["code"], call["how"], call["site"]["line"]) == (code, how, 2)


def test_a_success_is_no_exit_call(tmp_path: Path) -> None:
    assert events(tmp_path, "import sys\nsys.exit(0)\n", "exit_call") == []


@pytest.mark.parametrize("call", ["os.kill(os.getpid(), 9)", "signal.raise_signal(9)"])
def test_kills(tmp_path: Path, call: str) -> None:
    (seen,) = events(tmp_path, f"import os, signal\n{call}\n", "kill_call")
    assert (seen["signal"], seen["site"]["line"]) == (9, 2)


def test_a_signal_that_ends_nothing_is_not_noted(tmp_path: Path) -> None:
    assert events(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGCHLD)\nos.kill(os.getpid(), 0)\n", "kill_call") == []


def test_objects_that_do_not_want_to_be_printed(tmp_path: Path) -> None:
    script = (
        "class Shy(Exception):\n    def __str__(self): raise RuntimeError('no')\n    __repr__ = __str__\n"
        "import sys\ntry:\n    raise Shy\nexcept Shy:\n    raise ValueError('then this')\n"
    )
    (failure,) = events(tmp_path, script, "failure")
    assert failure["message"] == "then this" and "whose repr() raised RuntimeError" in failure["cause"]
    (tmp_path / "exit").mkdir()
    (call,) = events(tmp_path / "exit", script.split("import sys")[0] + "import sys\nsys.exit(Shy())\n", "exit_call")
    assert "whose str() raised RuntimeError" in call["code"]


def test_the_line_of_a_syntax_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ny = = 2\n")
    (failure,) = events(tmp_path, "import sys\nsys.path.insert(0, '')\nimport broken\n", "failure")
    assert (failure["site"]["file"].rpartition("/")[2], failure["site"]["line"]) == ("broken.py", 2)


def test_the_trace_holds_no_frame_of_ours_and_every_frame_of_the_users(tmp_path: Path) -> None:
    """A user's own project may have a folder called harness/probe."""
    own = tmp_path / "harness" / "probe"
    own.mkdir(parents=True)
    (own / "step.py").write_text("def step():\n    raise KeyError('image')\n")
    script = "import sys\nsys.path.insert(0, 'harness/probe')\nimport step, threading\nthreading.Thread(target=step.step).start()\n"
    (failure,) = events(tmp_path, script, "failure")
    assert "harness/probe/step.py" in failure["trace"] and str(PROBE_DIR) not in failure["trace"]
    assert failure["site"]["line"] == 2


def test_what_tempfile_tries_a_folder_with_is_its_own(tmp_path: Path) -> None:
    """It tries the folder for temporary files by writing one there, at the first call: under torch's imports in one run, below a line of the user's in another."""
    script = """
import os, tempfile
name = tempfile.NamedTemporaryFile(dir=tempfile.gettempdir())
name.close()
with tempfile.TemporaryDirectory(dir="."):
    pass
open("mine", "w").close()
os.remove("mine")
"""
    told = events(tmp_path, "import torch\n" + script, "remove")
    assert [e["site"]["line"] for e in told] == [5, 6, 9]  # none on line 4, which asks for the folder; what the script cleans up is its own doing
    assert told[-1]["path"] == str(tmp_path / "mine")
