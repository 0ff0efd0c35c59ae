"""Runs one fault through a session in this process, on warm servers that are kept from case to case, and gathers the evidence."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
from fault_cases import Case
from fault_script import script

from harness import catalog, replay
from harness.launch import driver, proctable, shm
from harness.planning import make_job
from harness.report import json as report_json
from harness.report import live
from harness.report.console import Style
from harness.session import Session
from harness.settings import resolve
from harness.watch.view import View

SCRIPT = "train.py"
GRACE_S = 2.0
COLD_START_S = 20.0  # torchrun's agent and its ranks import torch anew, on a busy machine; a limit of the whole run counts that
PATIENCE_S = 120.0


@dataclass
class Evidence:
    """What became of one case."""

    report: dict[str, Any]
    folder: Path
    source: str
    verdict_after_s: float | None  # from the fault to the verdict; None where the fault did not happen
    run_id: str
    left: list[str]
    stored: dict[str, Any]  # report.json as it lies in the run folder
    cold_s: float  # what fresh interpreters may need before the script begins; 0 under warm servers

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [f for f in self.report["findings"] if f["severity"] == "error"]


class Stage:
    """One supervisor for many cases."""

    def __init__(self, parent: Path, launcher: str = "warm") -> None:
        self.parent, self.launcher = parent, launcher
        self.cold_s = 0.0 if launcher == "warm" else COLD_START_S
        self.supervisor = driver.Supervisor()
        self.session = Session(live.Live(None, Style()), self.supervisor, driver.command, View, parent)
        self.schema = json.loads(report_json.SCHEMA_FILE.read_text())
        self._count = 0

    def close(self) -> None:
        self.supervisor.close()

    def play(self, case: Case) -> Evidence:
        self._count += 1
        folder = self.parent / f"{self._count}_{case.name}"
        folder.mkdir()
        with self._mounted(folder, case.disk_bytes), memory_group(case.memory_bytes) as group:
            return self._play(case, folder, {"FAULT_CGROUP": str(group)} if group else {})

    def _play(self, case: Case, folder: Path, env: dict[str, str]) -> Evidence:
        source = script(case.when, case.what, case.guard)
        (folder / SCRIPT).write_text(source)
        timeout_s = case.timeout_s + (self.cold_s if case.reason == "timeout" else 0.0)
        flags = {"nproc": str(case.nproc), "timeout": str(timeout_s), "grace": str(GRACE_S), "launcher": self.launcher, "device": "cpu"}
        if case.hang_timeout_s:
            flags["hang_timeout"] = str(case.hang_timeout_s)
        settings = resolve({**{SPELLED.get(k, k): v for k, v in flags.items()}, "no_reference": "true"}, {}, folder)
        job = make_job(catalog.user_script(SCRIPT, folder), settings, (), folder, {})
        job = replace(job, plan=replace(job.plan, cwd=str(folder), env={**job.plan.env, "OMP_NUM_THREADS": "1", **env}), reference=None)
        before = set(shm.segments())
        self.session.cwd = folder
        self.session.interrupts.signal = None
        hand = Hand(case, folder, job.plan.run_id, self.supervisor)
        hand.start()
        try:
            with self.session.interrupts.caught():
                result = self.session.run_one(job, replay.Judging())
        finally:
            hand.join()
        ended_ns = time.time_ns()
        report = json.loads(json.dumps(result.report))
        jsonschema.validate(report, self.schema)
        since = [int(path.read_text()) for path in folder.glob("here*") if path.read_text().isdigit()]
        after_s = (ended_ns - min(since)) / 1e9 if since else None
        left = leftovers(job.plan.run_id, before, report)
        stored = json.loads((result.folder / "report.json").read_text())
        return Evidence(report, result.folder, source, after_s, job.plan.run_id, left, stored, self.cold_s)

    @contextlib.contextmanager
    def _mounted(self, folder: Path, num_bytes: int) -> Iterator[None]:
        """A small disk where the case wants one; needs root."""
        if not num_bytes:
            yield
            return
        assert os.system(f"mount -t tmpfs -o size={num_bytes} none {folder}") == 0
        try:
            yield
        finally:
            os.system(f"umount -l {folder}")


def can_limit_memory() -> bool:
    try:
        with memory_group(1 << 20):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path | None]:
    """A control group with this much memory; OSError where we may not make one."""
    if not limit_bytes:
        yield None
        return
    first = Path("/sys/fs/cgroup/memory")  # version 1; else version 2
    group = (first if first.is_dir() else Path("/sys/fs/cgroup")) / f"harness_fault_{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if first.is_dir() else "memory.max")).write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


SPELLED = {"timeout": "timeout_s", "grace": "grace_s", "hang_timeout": "hang_timeout_s"}


class Hand(threading.Thread):
    """What comes from outside: waits until the script says that the moment has come, then acts."""

    def __init__(self, case: Case, folder: Path, run_id: str, supervisor: driver.Supervisor) -> None:
        super().__init__(daemon=True)
        self.case, self.folder, self.run_id, self.supervisor = case, folder, run_id, supervisor
        self._over = threading.Event()

    def run(self) -> None:
        if self.case.outside is None:
            return
        while not any(path.read_text().isdigit() for path in self.folder.glob("here*")):  # written, not only opened
            if self._over.wait(0.02):
                return
        OUTSIDE[self.case.outside](self)

    def join(self, timeout: float | None = None) -> None:
        self._over.set()
        if self.is_alive():
            super().join(timeout)

    def run_dir(self) -> Path:
        return (self.folder / ".harness" / "latest").resolve()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir() / "supervisor.jsonl").read_text().splitlines()]

    def pid_of(self, kind: str, **like: Any) -> int:
        return next(int(e["pid"]) for e in self.events() if e["ev"] == kind and all(e.get(k) == v for k, v in like.items()))


def _kill_agent(hand: Hand) -> None:
    os.kill(hand.pid_of("started"), signal.SIGKILL)


def _kill_rank(hand: Hand) -> None:
    os.kill(hand.pid_of("rank", rank=1), signal.SIGKILL)


def _terminate_rank(hand: Hand) -> None:
    os.kill(hand.pid_of("rank", rank=1), signal.SIGTERM)


def _delete_folder(hand: Hand) -> None:
    shutil.rmtree(hand.run_dir(), ignore_errors=True)


def _signal(number: int) -> Callable[[Hand], None]:
    return lambda hand: os.kill(os.getpid(), number)


OUTSIDE: dict[str, Callable[[Hand], None]] = {
    "kill agent": _kill_agent,
    "kill rank": _kill_rank,
    "terminate rank": _terminate_rank,
    "delete folder": _delete_folder,
    "ctrl-c": _signal(signal.SIGINT),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGHUP": _signal(signal.SIGHUP),
}


def leftovers(run_id: str, before: set[str], report: dict[str, Any]) -> list[str]:
    """Processes, ports and segments of the run that are still there; looked up here, not taken from the report."""
    processes = proctable.marked(proctable.snapshot(), run_id)
    ports = proctable.listening_ports(p.pid for p in processes)
    pids = {r["pid"] for r in report["ranks"] if r.get("pid")} | {e["pid"] for e in report["ending"]["exits"]}
    ours = [name for name in set(shm.segments()) - before if shm.made_by(name, pids) or name.startswith("harness_fault_")]
    found = [f"process {p.pid} {proctable.command_line(p.pid)} ports {ports.get(p.pid, [])}" for p in processes]
    return [*found, *(f"segment {name}" for name in ours)]
