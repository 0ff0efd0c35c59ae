"""The controller's side of a launch: one supervisor process for a whole `harness run A B C`, one handle a run."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.launch import job as wire
from harness.launch.command import HARNESS_ROOT, Command
from harness.model import Ending, Plan, RankExit

# By -I and an explicit path: neither a `harness` package in the user's folder nor PYTHONPATH decides what the supervisor is.
_BOOT = "import sys; sys.path.insert(0, {root!r}); from harness.launch.supervisor import main; main(sys.argv[1:])"
CLOSE_S = 15.0


def launch_command(plan: Plan, run_dir: Path) -> Command:
    """What the plan's launcher would start. ValueError where there is no such launcher, or it cannot run such a plan."""
    try:
        make = importlib.import_module(f"harness.launch.{plan.launcher}").LAUNCHER
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"no launcher {plan.launcher!r}") from error
    launch: Command = make(plan, run_dir)
    return launch


def command(plan: Plan, run_dir: Path) -> tuple[list[str], dict[str, str]]:
    """The exact argv and the added environment, for `--dry-run`; starts nothing."""
    launch = launch_command(plan, run_dir)
    return list(launch.argv), dict(launch.env)


class RunHandle:
    """One run: what is known of it so far, and a way to end it."""

    def __init__(self, supervisor: Supervisor, run_id: str) -> None:
        self._supervisor, self.run_id = supervisor, run_id
        self.exits: list[RankExit] = []
        self.pids: dict[int, int] = {}
        self.fallback = ""  # why the real torchrun had to take the place of warm servers
        self.ending: Ending | None = None

    def poll(self) -> Ending | None:
        """The ending, or None while the run goes on; reads what the supervisor has said, waits for nothing."""
        self._supervisor.pump()
        return self.ending

    def wait(self, timeout_s: float | None = None) -> Ending | None:
        """Waits for the ending, at most `timeout_s`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self.poll() is None and (until is None or time.monotonic() < until):
            self._supervisor.rest(0.05)
        return self.ending

    def stop(self, reason: str) -> None:
        """Asks for the gang's end (TERM, grace, KILL); poll() gives the ending when nothing is left."""
        self._supervisor.say({"do": wire.STOP, "reason": reason})

    def on_event(self, event: Mapping[str, Any]) -> None:
        if event["ev"] == wire.RANK:
            self.pids[event["rank"]] = event["pid"]
        elif event["ev"] == wire.EXIT:
            self.exits.append(_rank_exit(event))
        elif event["ev"] == wire.FALLBACK:
            self.fallback = event["reason"]
        elif event["ev"] == wire.ENDING:
            self.exits = [_rank_exit(raw) for raw in event["exits"]]
            self.ending = Ending(
                reason=event["reason"],
                started=event["started"],
                exits=tuple(self.exits),
                left_behind=tuple(event["left_behind"]),
                oom_kills=event["oom_kills"],
                launcher_error=event["launcher_error"],
                wall_s=event["wall_s"],
            )


def _rank_exit(raw: Mapping[str, Any]) -> RankExit:
    return RankExit(raw["rank"], raw["pid"], raw["code"], raw["time_ns"], raw["by_us"])


class Supervisor:
    """Starts, feeds and closes the supervisor process."""

    def __init__(self, python: str = "") -> None:
        self._python = python or sys.executable
        self._process: subprocess.Popen[bytes] | None = None
        self._handle: RunHandle | None = None
        self._partial = b""
        self._started = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """About 40 ms. In a session of its own: Ctrl-C in the terminal reaches the controller only."""
        terminal = [os.dup(number) for number in (0, 1, 2)]
        try:
            self._process = subprocess.Popen(
                [self._python, "-I", "-c", _BOOT.format(root=str(HARNESS_ROOT)), *map(str, terminal)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, pass_fds=terminal,
            )  # fmt: skip
        finally:
            for number in terminal:
                os.close(number)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def run(self, plan: Plan, run_dir: Path) -> RunHandle:
        """Starts a run; the one before must have ended."""
        if self._process is None:
            self.start()
        if self._handle is not None and self._handle.ending is None:
            raise RuntimeError("a run is still going on")
        launch = launch_command(plan, run_dir)
        self._handle, self._started = RunHandle(self, plan.run_id), time.monotonic()
        self.send(wire.job_line(plan, run_dir, launch))
        return self._handle

    def say(self, order: Mapping[str, Any]) -> None:
        self.send(json.dumps(order) + "\n")

    def send(self, line: str) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line.encode())
            process.stdin.flush()

    def pump(self) -> None:
        """Hands what the supervisor has said to the current run."""
        process = self._process
        if process is None or process.stdout is None or self._handle is None:
            return None
        while (chunk := _read(process.stdout.fileno())) is not None:
            if not chunk:
                return self._lost(self._handle)
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            for line in lines:
                self._handle.on_event(json.loads(line))
        return None

    def _lost(self, handle: RunHandle) -> None:
        """The supervisor was killed: its gang ends by the kernel's parent-death signals; what is marked and left, we end."""
        if handle.ending is None:
            from harness.launch.orphans import end_marked  # rare: not worth its import in every start

            left = end_marked(handle.run_id)
            wall_s = time.monotonic() - self._started
            handle.ending = Ending("exited", bool(handle.pids), tuple(handle.exits), 0.0, (), left, "the supervisor was killed", wall_s)

    def rest(self, seconds: float) -> None:
        """Waits until the supervisor says something, at most so long."""
        import select

        if self._process is not None and self._process.stdout is not None:
            select.select([self._process.stdout], [], [], seconds)

    def close(self) -> None:
        """Ends a running gang and the warm servers, and the supervisor with them."""
        process, self._process = self._process, None
        if process is None or process.stdin is None or process.stdout is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _read(fd: int) -> bytes | None:
    """What is there: None where nothing is yet, empty at the end."""
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return None
