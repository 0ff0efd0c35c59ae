"""One run inside the supervisor, from its command to the proof that nothing is left.

running   the agent lives. A stop sends it SIGTERM and, after the grace, SIGKILL to every process of the run; so does a rank that failed
          while others ignore the agent's SIGTERM.
settling  the agent is gone. What is left gets a short moment (helpers of multiprocessing end themselves), or the grace where the agent
          died before its ranks; then SIGKILL.
ended     nothing of the run lives, or what lives cannot be killed; /dev/shm is looked through and the ending is told.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.launch import job as wire
from harness.launch import proctable, shm, spawn
from harness.launch.command import AGENT_LOG, Command
from harness.launch.job import Account, Job, RankState
from harness.launch.proctable import Process
from harness.launch.rank_shim import FIFO
from harness.probe.protocol import LOG_DIR

MOMENT_S = 1.0  # for helpers that end by themselves once their parent is gone
GLANCE_S = 5.0
UNKILLABLE_S = 3.0  # a process that outlives SIGKILL that long sits in the kernel
FOLDER_DELETED = "folder-deleted"  # why a run was ended whose folder is gone
SPARED = "resource_tracker"  # removes the shared memory of a killed process at the end of its pipe: killed last
Tell = Callable[[dict[str, Any]], None]


class Gang:
    def __init__(self, job: Job, tell: Tell, servers: Callable[[], set[int]], terminal: tuple[int, ...]) -> None:
        self.job, self._tell, self._servers, self._terminal = job, tell, servers, terminal
        self.run_dir = Path(job.own_dir or job.run_dir)
        self.account = Account()
        self.agent: int | None = None
        self.agent_code: int | None = None
        self.ended = False
        self.reason = "exited"
        self._cold = False  # the real torchrun has taken the place of warm servers
        self._error = ""
        self._started = time.monotonic()
        self._segments = shm.segments()
        self._oom_kills = proctable.oom_kills()
        self._elders = {process.pid for process in proctable.descendants(proctable.snapshot(), os.getpid())}
        self._kill_at: float | None = None
        self._killed_at: float | None = None
        self._seen: dict[int, Process] = {}  # every process of the run that a look at the table has met
        self._leaks: list[str] = []
        self._mapped: set[str] = set()
        self._glanced = self._started
        self.fifo = _open_fifo(self.run_dir)
        self._fifo_inode = os.fstat(self.fifo).st_ino
        self._partial = b""

    # ---- running

    def start(self, command: Command, servers: str = "") -> None:
        """Starts the command; a command that cannot be started is an ending, not an error of ours."""
        if command.note:
            self._fallback(command.note)
        try:
            process = spawn.start(command, self.run_dir, self._terminal, servers)
        except OSError as error:
            return self.fail(f"{error.filename or command.argv[0]}: {error.strerror}")
        process.returncode = 0  # we reap every child ourselves; Popen must not
        self.agent = process.pid
        self._tell({"ev": "started", "pid": process.pid, "argv": list(command.argv)})
        return None

    def fail(self, error: str) -> None:
        self._error, self.agent_code = error, 127
        self._settle()

    def fall_back(self, reason: str) -> None:
        """The servers cannot serve this script: the real torchrun takes over, and that is said."""
        self._fallback(reason)
        self._cold = True
        assert self.job.command.fallback is not None
        self.start(self.job.command.fallback)

    def _fallback(self, reason: str) -> None:
        self._tell({"ev": wire.FALLBACK, "reason": reason})

    @property
    def waiting(self) -> bool:
        """Whether the command has not been started yet."""
        return self.agent is None and self.agent_code is None and not self.ended

    @property
    def pressing(self) -> bool:
        """Whether the clock matters: something ends."""
        return self._kill_at is not None

    def stop(self, reason: str, grace_s: float | None = None) -> None:
        """TERM to the agent, KILL to all after the grace; the reason of the first stop stays."""
        if self.ended or self.reason != "exited":
            return None
        self.reason = reason
        self._tell({"ev": "stop", "reason": reason})
        if self.agent is None and self.agent_code is None:
            self._error = "stopped before the launch"
            return self._end([])
        self._look()
        agent = self._seen.get(self.agent or -1)
        if self.agent_code is None and agent:
            proctable.send(agent, signal.SIGTERM)
        self._kill_by(self.job.grace_s if grace_s is None else grace_s)
        return None

    def members(self) -> list[Process]:
        """The living processes of the run, the agent among them."""
        return self._look()

    def on_fifo(self) -> None:
        try:
            self._partial += os.read(self.fifo, 65536)
        except BlockingIOError:
            return
        *lines, self._partial = self._partial.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # only our shims write here, but the script could too
                event = wire.shim_event(json.loads(line))
                self._on_exit(event) if "code" in event else self._on_rank(event)

    def _on_rank(self, event: dict[str, Any]) -> None:
        state = RankState(event["rank"], event["local_rank"], event["pid"], event["ticks"])
        self.account.ranks[state.rank] = state
        self._tell({"ev": wire.RANK, **event})

    def _on_exit(self, event: dict[str, Any]) -> None:
        state = self.account.ranks.get(event["rank"])
        if state is None or state.code is not None:
            return
        state.code, state.time_ns = event["code"], event["time_ns"]
        ends = {code for number in event["passed"] for code in (-number, 128 + number)}  # as a signal ends, bare or through a handler
        state.by_us = self.reason != "exited" or self._killed_at is not None or state.code in ends
        self._tell({"ev": wire.EXIT, **wire.exit_event(state)})
        if state.code != 0 and self._kill_at is None:  # the agent tears the others down; it waits 30 s for them, we wait the grace
            self._kill_by(self.job.grace_s + MOMENT_S)

    def on_child(self, pid: int, code: int) -> None:
        """A child of the supervisor was reaped: the agent, or an orphan of the run."""
        if pid == self.agent:
            self.agent_code = code
            self._tell({"ev": "agent", "pid": pid, "code": code})
            self.on_fifo()
            return self._start_cold() if self._never_served(code) else self._settle()
        for state in self.account.ranks.values():
            if state.pid == pid and state.code is None:  # its shim died: nobody else can tell
                self._on_exit({"rank": state.rank, "code": code, "time_ns": time.time_ns(), "passed": []})
        return None

    def _never_served(self, code: int) -> bool:
        """The servers were there a moment ago, but no rank came of it."""
        return bool(code) and self.job.command.fallback is not None and not self.account.ranks and self.reason == "exited" and not self._cold

    def _start_cold(self) -> None:
        said = _tail(self.run_dir / LOG_DIR / AGENT_LOG, 1)
        self.agent = self.agent_code = None
        self.fall_back(f"they did not answer{': ' + said[0].strip()[:200] if said else ''}")

    # ---- ending

    def _settle(self) -> None:
        running = any(state.code is None for state in self.account.ranks.values())
        if running and self.reason == "exited":
            self._signal_all(signal.SIGTERM)
        self._kill_by(self.job.grace_s if running else MOMENT_S, sooner_only=True)
        self.tick()

    def _kill_by(self, seconds: float, sooner_only: bool = False) -> None:
        at = time.monotonic() + seconds
        self._kill_at = min(at, self._kill_at) if sooner_only and self._kill_at else at

    def tick(self) -> None:
        """Moves on by the clock; called every few ms once something ends."""
        if self.ended:
            return None
        if self.agent_code is None and self._kill_at is None:
            return self.stop(FOLDER_DELETED) if self._folder_gone() else self._glance()
        now = time.monotonic()
        members = self._look()
        if self.reason == "exited" and self._folder_gone():
            self.stop(FOLDER_DELETED)
        if self.agent_code is not None and not members:
            return self._end([])
        if self._kill_at is not None and now >= self._kill_at:
            self._kill(members)
        if self._killed_at is not None and now >= self._killed_at + UNKILLABLE_S:
            self._end(members)
        return None

    def _folder_gone(self) -> bool:
        """Whether the run folder was deleted: ranks can no longer report there, and what they did could not be judged."""
        try:
            return (self.run_dir / FIFO).stat().st_ino != self._fifo_inode
        except FileNotFoundError:
            return True
        except OSError:  # a file system that stutters is not a deleted folder
            return False

    def _glance(self) -> None:
        """While all is well: which segments do our processes use? 5 ms a process with torch, so every 5 s only."""
        if time.monotonic() > self._glanced + GLANCE_S and self.agent is not None:
            self._glanced = time.monotonic()
            self._note_segments(self._look())

    def _note_segments(self, members: list[Process]) -> None:
        self._mapped.update(name for process in members for name in shm.mapped_by(process.pid))

    def _kill(self, members: list[Process]) -> None:
        if self._killed_at is None:
            self._killed_at = time.monotonic()
            self._note_segments(members)
            self._note(members)
        spare = time.monotonic() < self._killed_at + MOMENT_S
        for process in members:
            if not (spare and SPARED in proctable.command_line(process.pid, 4096)):
                proctable.send(process, signal.SIGKILL)

    def _note(self, members: list[Process]) -> None:
        """A run that ended by itself should have left nothing: what has to be killed is a finding of its own."""
        if self.reason != "exited" or any(state.code != 0 for state in self.account.ranks.values()):
            return
        for process in members:
            self._leaks.append(f"process {_describe(process)} outlived its rank and had to be killed")

    def _signal_all(self, number: int) -> None:
        for process in self._look():
            proctable.send(process, number)

    def _look(self) -> list[Process]:
        """The living processes of the run: those below us; when there are none, those that bear its mark wherever they hang."""
        table = proctable.snapshot()
        strangers = self._servers() | {os.getpid()} | self._elders
        members = [process for process in proctable.descendants(table, os.getpid()) if process.pid not in strangers]
        members = members or [process for process in proctable.marked(table, self.job.run_id) if process.pid not in strangers]
        self._seen.update((process.pid, process) for process in members)
        return members

    def _end(self, members: list[Process]) -> None:
        self.on_fifo()
        for state in self.account.ranks.values():
            if state.code is None:
                self._on_exit({"rank": state.rank, "code": -signal.SIGKILL, "time_ns": time.time_ns(), "passed": []})
        ports = proctable.listening_ports(process.pid for process in members)
        alive = [f"process {_describe(p)} outlives SIGKILL{_ports(ports.get(p.pid, []))}" for p in members]
        left = [*self._leaks, *alive, *self._sweep_segments()]
        self.ended = True
        self._tell(self._ending(left))

    def _sweep_segments(self) -> list[str]:
        """Removes segments that are provably ours and in no one's use. After a kill that is our own litter, else the script's, and told."""
        new = {name: inode for name, inode in shm.segments().items() if name not in self._segments}
        pids = {*self._seen, *(state.pid for state in self.account.ranks.values())}
        killed = self._killed_at is not None or any(state.code != 0 for state in self.account.ranks.values())
        noted = shm.noted(Path(self.job.run_dir)) if new else set()
        left: list[str] = []
        for name in sorted(new.keys() - shm.in_use(set(new))) if new else ():
            if not (name in self._mapped or shm.made_by(name, pids) or (name, new[name]) in noted):
                continue
            if not shm.remove(name, new[name]):
                left.append(f"/dev/shm/{name} was left behind and cannot be removed")
            elif not killed:
                left.append(f"/dev/shm/{name} was left behind and has been removed")
        return left

    def _ending(self, left: list[str]) -> dict[str, Any]:
        reason = self.reason if self.account.ranks or self.reason != "exited" else "launch-failed"
        return {
            "ev": wire.ENDING,
            "reason": reason,
            "started": bool(self.account.ranks),
            "exits": self.account.exits(),
            "left_behind": left,
            "oom_kills": max(0, proctable.oom_kills() - self._oom_kills),
            "launcher_error": self._launcher_error(),
            "wall_s": round(time.monotonic() - self._started, 3),
        }

    def _launcher_error(self) -> str:
        """The launcher's own failure; empty where a rank's failure or our stop explains its exit code."""
        explained = self.reason != "exited" or any(state.code and not state.by_us for state in self.account.ranks.values())
        if self._error or not self.agent_code or explained:
            return self._error
        how = f"exit code {self.agent_code}" if self.agent_code > 0 else f"killed by {signal.Signals(-self.agent_code).name}"
        return "\n".join([f"the launcher ended with {how}", *_tail(self.run_dir / LOG_DIR / AGENT_LOG)])

    def close(self) -> None:
        os.close(self.fifo)
        (self.run_dir / FIFO).unlink(missing_ok=True)


def _open_fifo(run_dir: Path) -> int:
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    (run_dir / FIFO).unlink(missing_ok=True)
    os.mkfifo(run_dir / FIFO, 0o600)
    return os.open(run_dir / FIFO, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # as a writer too: no end of file between two ranks


def _describe(process: Process) -> str:
    return f"{process.pid} ({proctable.command_line(process.pid) or process.name})"


def _ports(ports: list[int]) -> str:
    return f" and listens on port {', '.join(map(str, ports))}" if ports else ""


def _tail(path: Path, num_lines: int = 12) -> list[str]:
    try:
        with open(path, "rb") as log:
            log.seek(max(0, path.stat().st_size - 8192))
            return [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()][-num_lines:]
    except OSError:
        return []
