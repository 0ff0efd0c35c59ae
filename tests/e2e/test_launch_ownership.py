"""Whoever dies, nothing of a run is left: controller, supervisor, agent, rank; and a rank that will not end is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.launch import proctable
from harness.launch.driver import RunHandle, Supervisor
from harness.model import Plan, Scenario

ROOT = Path(__file__).resolve().parents[2]
# Rank 1 makes a grandchild in a session of its own; with "stubborn" the ranks do not end on SIGTERM.
SCRIPT = """
import os, signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: None)
if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True, env=dict(os.environ))
    open("grandchild", "w").write(str(child.pid))
open("ready" + os.environ["RANK"], "w").close()
while True:
    time.sleep(0.05)
"""
CONTROLLER = """
import sys
from pathlib import Path
from harness.launch.driver import Supervisor
from harness.model import Plan, Scenario
folder, launcher, nproc, run_id = sys.argv[1:]
supervisor = Supervisor()
plan = Plan(run_id, Scenario("x", "train.py"), ("stubborn",), int(nproc), launcher=launcher, cwd=folder, grace_s=0.5)
handle = supervisor.run(plan, Path(folder) / "run")
print(supervisor.pid, flush=True)
handle.wait()
"""


def until(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not in {timeout_s} s: {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    process = proctable.read(pid)
    return process is None or not process.alive


def nothing_left(run_id: str) -> bool:
    return not proctable.marked(proctable.snapshot(), run_id)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.close()


def started(supervisor: Supervisor, folder: Path, launcher: str, *arguments: str, nproc: int = 1, grace_s: float = 0.5) -> RunHandle:
    """A run whose ranks are all in their loop."""
    plan = Plan(
        f"own-{os.getpid()}-{time.time_ns()}",
        Scenario("x", "train.py"),
        arguments,
        nproc,
        launcher=launcher,
        cwd=str(folder),
        grace_s=grace_s,
    )
    handle = supervisor.run(plan, folder / "run")
    until(lambda: handle.poll() is not None or all((folder / f"ready{rank}").exists() for rank in range(nproc)), "the ranks run")
    until(lambda: handle.poll() is not None or len(handle.pids) == nproc, "the ranks are known")
    return handle


@pytest.mark.parametrize(("launcher", "nproc"), [("inline", 1), ("warm", 2)])
def test_a_killed_controller_leaves_nothing(folder: Path, launcher: str, nproc: int) -> None:
    run_id = f"killed-{os.getpid()}-{launcher}"
    command = [sys.executable, "-c", CONTROLLER, str(folder), launcher, str(nproc), run_id]
    controller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert controller.stdout is not None
    with controller.stdout:
        supervisor = int(controller.stdout.readline())
    until(lambda: all((folder / f"ready{rank}").exists() for rank in range(nproc)), "the ranks run")
    below = {process.pid for process in proctable.descendants(proctable.snapshot(), supervisor)}
    controller.kill()
    controller.wait()
    until(lambda: gone(supervisor) and all(map(gone, below)) and nothing_left(run_id), "everything has ended", 20.0)
    assert int((folder / "grandchild").read_text()) in below
    events = [json.loads(line) for line in (folder / "run" / "supervisor.jsonl").read_text().splitlines()]
    assert events[-1]["ev"] == "ending" and events[-1]["reason"] == "controller died"
    assert {exit["code"] for exit in events[-1]["exits"]} == {-signal.SIGKILL}  # stubborn ranks


def test_stop_is_term_then_kill(supervisor: Supervisor, folder: Path) -> None:
    handle = started(supervisor, folder, "inline", "stubborn")
    assert os.getsid(supervisor.pid) == supervisor.pid != os.getsid(0)  # Ctrl-C in our terminal does not reach it
    begun = time.monotonic()
    handle.stop("timeout")
    ending = handle.wait(20.0)
    assert ending is not None and ending.reason == "timeout" and 0.5 <= time.monotonic() - begun < 10.0
    assert [(exit.code, exit.by_us) for exit in ending.exits] == [(-signal.SIGKILL, True)]
    assert ending.left_behind == () and gone(int((folder / "grandchild").read_text()))


def test_a_rank_that_ends_on_term_is_not_killed(supervisor: Supervisor, folder: Path) -> None:
    handle = started(supervisor, folder, "inline", grace_s=30.0)
    handle.stop("hang")
    ending = handle.wait(20.0)
    assert ending is not None and [(exit.code, exit.by_us) for exit in ending.exits] == [(-signal.SIGTERM, True)]


def test_what_outlives_a_normal_exit_is_killed_and_named(supervisor: Supervisor, folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT.replace("while True:", "while False:"))
    handle = started(supervisor, folder, "inline")
    ending = handle.wait(20.0)
    child = int((folder / "grandchild").read_text())
    assert ending is not None and [exit.code for exit in ending.exits] == [0]
    assert len(ending.left_behind) == 1 and ending.left_behind[0].startswith(f"process {child} (") and gone(child)


def test_a_killed_supervisor_takes_the_gang_along(folder: Path) -> None:
    supervisor = Supervisor()
    handle = started(supervisor, folder, "inline", "stubborn")
    os.kill(supervisor.pid, signal.SIGKILL)
    ending = handle.wait(20.0)
    assert ending is not None and ending.launcher_error == "the supervisor was killed" and ending.left_behind == ()
    assert all(map(gone, handle.pids.values())) and gone(int((folder / "grandchild").read_text()))
    supervisor.close()


def test_a_rank_killed_from_outside_is_not_by_us(supervisor: Supervisor, folder: Path) -> None:
    handle = started(supervisor, folder, "inline")
    os.kill(handle.pids[0], signal.SIGKILL)
    ending = handle.wait(20.0)
    assert ending is not None and [(exit.code, exit.by_us) for exit in ending.exits] == [(-signal.SIGKILL, False)]


@pytest.mark.parametrize("victim", ["agent", "rank"])
def test_death_under_the_warm_launcher(supervisor: Supervisor, folder: Path, victim: str) -> None:
    """A dead agent ends its ranks; a dead rank ends the others, even those that ignore SIGTERM; the servers live on."""
    handle = started(supervisor, folder, "warm", "stubborn", nproc=2)
    events = [json.loads(line) for line in (folder / "run" / "supervisor.jsonl").read_text().splitlines()]
    agent = next(event["pid"] for event in events if event["ev"] == "started")
    os.kill(agent if victim == "agent" else handle.pids[1], signal.SIGKILL)
    ending = handle.wait(30.0)
    assert ending is not None and ending.reason == "exited" and ending.left_behind == ()
    codes = {exit.rank: (exit.code, exit.by_us) for exit in ending.exits}
    if victim == "agent":
        assert codes == {0: (-signal.SIGKILL, True), 1: (-signal.SIGKILL, True)}
        assert ending.launcher_error.startswith("the launcher ended with killed by SIGKILL")
    else:
        assert codes == {0: (-signal.SIGKILL, True), 1: (-signal.SIGKILL, False)}
    (folder / "train.py").write_text("print('still served')\n")
    plan = Plan(f"again-{os.getpid()}", Scenario("x", "train.py"), (), 2, launcher="warm", cwd=str(folder))
    again = supervisor.run(plan, folder / "again")
    ended = again.wait(60.0)
    assert ended is not None and [exit.code for exit in ended.exits] == [0, 0] and again.fallback == ""


def test_the_real_torchrun_keeps_every_code(supervisor: Supervisor, folder: Path) -> None:
    (folder / "train.py").write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)\n")
    plan = Plan(f"codes-{os.getpid()}", Scenario("x", "train.py"), (), 3, launcher="torchrun", cwd=str(folder))
    ending = supervisor.run(plan, folder / "run").wait(120.0)
    assert ending is not None and ending.reason == "exited" and ending.launcher_error == ""
    assert {exit.rank: (exit.code, exit.by_us) for exit in ending.exits} == {0: (-15, True), 1: (7, False), 2: (-15, True)}


def test_a_stop_before_the_launch(folder: Path) -> None:
    """While servers load no rank has been started; the stop does not wait for them, and closing takes them along."""
    supervisor = Supervisor()
    (folder / "train.py").write_text("import torch\n")
    plan = Plan(f"early-{os.getpid()}", Scenario("x", "train.py"), (), 2, launcher="warm", cwd=str(folder))
    handle = supervisor.run(plan, folder / "run")
    until(lambda: bool(proctable.descendants(proctable.snapshot(), supervisor.pid)), "the servers load")
    servers = proctable.descendants(proctable.snapshot(), supervisor.pid)
    handle.stop("interrupted")
    ending = handle.wait(20.0)
    assert ending is not None and (ending.reason, ending.started, ending.exits) == ("interrupted", False, ())
    supervisor.close()
    assert all(gone(server.pid) for server in servers)


def test_a_run_folder_that_cannot_be_made(supervisor: Supervisor, folder: Path) -> None:
    plan = Plan("none", Scenario("x", "train.py"), (), 1, launcher="inline", cwd=str(folder))
    ending = supervisor.run(plan, folder / "train.py" / "run").wait(20.0)
    assert ending is not None and (ending.reason, ending.started) == ("launch-failed", False)
    assert ending.launcher_error.endswith("Not a directory")


def test_what_cannot_be_launched(supervisor: Supervisor, folder: Path) -> None:
    plan = Plan("none", Scenario("x", "train.py"), (), 1, launcher="inline", cwd=str(folder), python=str(folder / "no-python"))
    ending = supervisor.run(plan, folder / "run").wait(20.0)
    assert ending is not None and (ending.reason, ending.started) == ("launch-failed", False)
    assert "no-python" in ending.launcher_error


LEAVES = """
import torch
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
memory.close()
open("name", "w").write(memory.name)
"""


def test_shared_memory_that_a_short_run_leaves_is_named_and_removed(supervisor: Supervisor, tmp_path: Path) -> None:
    """It is mapped for a moment only, so no look of the supervisor's meets it: the rank notes that it made it."""
    (tmp_path / "train.py").write_text(LEAVES)
    plan = Plan(f"leaves-{os.getpid()}", Scenario("x", "train.py"), (), 1, cwd=str(tmp_path))
    ending = supervisor.run(plan, tmp_path / "run").wait(120.0)
    name = (tmp_path / "name").read_text()
    assert ending is not None and ending.left_behind == (f"/dev/shm/{name} was left behind and has been removed",)
    assert not Path(f"/dev/shm/{name}").exists()
