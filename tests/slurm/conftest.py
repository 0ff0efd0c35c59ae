"""A real Slurm for these tests: a cluster of our own (scripts/slurm-dev-cluster), beside whatever this machine has.

Where none can be had (not root, no Slurm installed, no namespaces), every test here is skipped and the end of the output says why. The slow ones
(time limit, node crash, preemption, all scenarios) run by scripts/reliability-slurm, which sets HARNESS_TEST_SLURM_SLOW.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parents[2]
DEV_CLUSTER = ROOT / "scripts" / "slurm-dev-cluster"
TINY, QUICK = Path(__file__).with_name("tiny.py"), Path(__file__).with_name("quick.py")
GOES_ON = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
SLOW = bool(os.environ.get("HARNESS_TEST_SLURM_SLOW"))
_reason: list[str] = []


class Run:
    """One `harness` command that goes on."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log

    @property
    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def wait_for(self, words: str, limit_s: float = 90.0) -> str:
        """The output once it holds these words (a regular expression)."""
        until = time.monotonic() + limit_s
        while not re.search(words, self.text):
            assert self.process.poll() is None or re.search(words, self.text), f"ended without {words!r}:\n{self.text}"
            assert time.monotonic() < until, f"never said {words!r}:\n{self.text}"
            time.sleep(0.1)
        return self.text

    def job(self) -> str:
        return re.search(r"scancel (\S+);", self.wait_for("scancel"))[1]  # type: ignore[index]

    def end(self, limit_s: float = 120.0) -> tuple[int, str]:
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"did not end within {limit_s:.0f} s:\n{self.text}") from None
        return code, self.text


class Cluster:
    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        done = subprocess.run([DEV_CLUSTER, "start", "--dir", folder, *options], capture_output=True, text=True, timeout=120)
        assert done.returncode in (0, 2), done.stderr  # 2: it says what is missing; anything else is a bug of the script
        if done.returncode:
            raise RuntimeError(done.stderr.strip().removeprefix("slurm-dev-cluster: "))
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "HARNESS_", "_HARNESS_"))}
        self.env = {**clean, "SLURM_CONF": str(folder / "etc/slurm.conf"), "OMP_NUM_THREADS": "1"}

    def control(self, *words: str) -> None:
        subprocess.run([DEV_CLUSTER, *words, "--dir", self.folder], check=True, capture_output=True, timeout=60)

    def client(self, *words: str) -> str:
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ended(self, job: str, limit_s: float = 150.0) -> str:
        """The state in which a job ended; `sbatch --wait` asks ever more rarely, and adds up to half a minute."""
        until = time.monotonic() + limit_s
        while (state := re.search(r"JobState=(\S+)", self.client("scontrol", "-o", "show", "job", job))) is None or state[1] in GOES_ON:
            assert time.monotonic() < until, f"job {job} did not end: {state}"
            time.sleep(0.2)
        return state[1]

    def start(self, cwd: Path, *words: str, user: int | None = None, **env: str) -> Run:
        log = Path(tempfile.mkstemp(dir=cwd, prefix="out-", suffix=".log")[1])
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "harness", *words], cwd=cwd, env={**self.env, **env}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                user=user,
            )  # fmt: skip
        return Run(process, log)

    def run(self, cwd: Path, *words: str, **env: str) -> tuple[int, str]:
        return self.start(cwd, *words, **env).end()

    def inside(self, node: str, *words: str) -> None:
        """Runs a command in a node's own mount namespace."""
        mark = f"_node {self.folder} {node}"
        pid = next(process.pid for process in processes() if process.line.endswith(mark) and not process.line.startswith("unshare"))
        subprocess.run(["nsenter", "--mount", "--target", str(pid), *words], check=True, timeout=20)

    def left_behind(self, mark: str) -> list[str]:
        """Processes on any node that name this folder or stand in it; nodes are namespaces of this machine, so all are seen."""
        return [process.line for process in processes() if process.pid != os.getpid() and process.knows(mark)]

    def nothing_left(self, mark: str, limit_s: float = 15.0) -> None:
        until = time.monotonic() + limit_s
        while left := self.left_behind(mark):
            assert time.monotonic() < until, "\n".join(left)
            time.sleep(0.2)

    def stop(self) -> None:
        subprocess.run([DEV_CLUSTER, "stop", "--dir", self.folder], capture_output=True, timeout=60)


@dataclass(frozen=True)
class Process:
    pid: int
    line: str
    more: str  # its environment and its folder

    def knows(self, mark: str) -> bool:
        return mark in self.line or mark in self.more


def processes() -> list[Process]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # gone meanwhile, or no process
            words, more = ((entry / name).read_bytes().decode("utf-8", "replace") for name in ("cmdline", "environ"))
            found.append(Process(int(entry.name), words.replace("\0", " ").strip(), f"{more}\0{(entry / 'cwd').readlink()}"))
    return found


def bring_up(*options: str) -> Cluster:
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: a test run that is ended takes its clusters along
    folder = Path(tempfile.mkdtemp(prefix="hs", dir="/tmp"))  # short: sockets lie below it
    folder.chmod(0o755)
    try:
        return Cluster(folder, *options)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def cluster_of(*options: str) -> Iterator[Cluster]:
    one = bring_up(*options)
    try:
        yield one
    finally:
        one.stop()
        shutil.rmtree(one.folder, ignore_errors=True)


def no_slurm(error: Exception) -> NoReturn:
    """Skips, and the end of the output says why."""
    _reason.append(str(error))
    pytest.skip(f"no Slurm can be had here: {error}")


def wait_idle(cluster: Cluster, num_nodes: int, limit_s: float = 60.0) -> None:
    until = time.monotonic() + limit_s
    while cluster.client("sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%D").strip() != str(num_nodes):
        assert time.monotonic() < until, cluster.client("sinfo", "-N", "-l")
        time.sleep(0.5)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    try:
        one = bring_up("--nodes", "4")
    except (RuntimeError, OSError) as error:
        no_slurm(error)
    yield one
    one.stop()
    shutil.rmtree(one.folder, ignore_errors=True)


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with a tiny training in it, and a job without torch."""
    for script in (TINY, QUICK):
        shutil.copy(script, tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _end_what_a_failed_test_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        one: Cluster = request.getfixturevalue("cluster")
        subprocess.run(["scancel", "--user=root", "--signal=KILL"], env=one.env, capture_output=True, timeout=20)
        subprocess.run(["scancel", "--user=root"], env=one.env, capture_output=True, timeout=20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not SLOW:
            item.add_marker(pytest.mark.skip(reason="slow: scripts/reliability-slurm runs it"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _reason:
        terminalreporter.write_line(f"tests/slurm was skipped, in part or whole: no Slurm can be had here: {'; '.join(dict.fromkeys(_reason))}")


def interrupt(run: Run) -> None:
    run.process.send_signal(signal.SIGINT)
