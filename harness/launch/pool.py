"""The warm servers of a supervisor: started when a run first needs them, kept for the next run, ended with the supervisor.

Servers come in sets. Within a set there is one a local rank; all were started under one environment, which torch has read when it was
imported. A run with one process has another environment than a run with two (OMP_NUM_THREADS), so two sets are kept for a session whose
scripts alternate between them; a reference run has its script's own and finds it loaded. torchrun's agent has one server for all sets.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.launch import proctable
from harness.launch.command import LAUNCH_DIR, Warmth
from harness.launch.spawn import clean_environment
from harness.launch.warm_wire import AGENT
from harness.probe.protocol import ENV_RUN_ID

LOADING_S = 180.0  # imports on a cold disk and a loaded machine
LEAVE_S = 5.0
MAX_SETS = 2
MAX_FOLDER_PATH = 80  # the kernel allows 107 bytes for the path of a socket
# As a string and not as a file: a frame of ours under a script must not look like a file of the user's.
BOOT = "import sys; __file__ = sys.argv.pop(1); exec(compile(open(__file__, encoding='utf-8').read(), '<harness warm_server>', 'exec'))"
MARK = "-" * 64  # room for a run id in /proc/<pid>/environ of a forked rank


@dataclass
class Server:
    """One preloaded interpreter as the supervisor sees it."""

    control: int
    ready: int
    socket: Path
    pid: int = 0
    asked: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    waiting: int = 0  # answers that have not come yet
    problem: str = ""
    partial: bytes = b""


@dataclass
class Set:
    """Servers under one environment, each on a socket in `folder` that bears its local rank."""

    env: Mapping[str, str]
    folder: Path
    servers: list[Server] = field(default_factory=list)


class Pool:
    def __init__(self, watch: Callable[[int, Callable[[], None]], None], unwatch: Callable[[int], None]) -> None:
        self._watch, self._unwatch = watch, unwatch
        self._python, self._folder = "", Path()
        self._agent: Server | None = None
        self._sets: list[Set] = []  # the last used one last
        self._since = 0.0
        self._count = 0
        self._again = True  # whether vanished servers may be started once more for this run

    @property
    def folder(self) -> str:
        """Where the clients of the prepared run find their servers."""
        return str(self._sets[-1].folder)

    def pids(self) -> set[int]:
        return {server.pid for server in self._all()}

    def _all(self) -> list[Server]:
        return [server for each in self._sets for server in each.servers] + ([self._agent] if self._agent else [])

    def prepare(self, warmth: Warmth) -> None:
        """Starts what is missing. Servers with a problem, that vanished, or of another interpreter, are replaced."""
        self._again = True
        self._prepare(warmth)

    def _prepare(self, warmth: Warmth) -> None:
        if warmth.python != self._python or any(server.problem for server in self._all()) or self._vanished():
            self.close()
        if not self._all():
            self._python, self._folder = warmth.python, _private_folder()
        chosen = self._choose(server_environment(warmth))
        self._since = time.monotonic()
        while len(chosen.servers) < warmth.count:
            self._start(chosen)
        for server in chosen.servers[: warmth.count]:
            self._ask(server, warmth.preload)

    def _vanished(self) -> bool:
        """Whether a server that has answered is gone, or its socket: somebody clears /tmp, or kills what he does not know."""
        ready = [server for server in self._all() if server.pid and not server.waiting]
        return any(not server.socket.is_socket() or not _lives(server.pid) for server in ready)

    def _choose(self, env: Mapping[str, str]) -> Set:
        chosen = next((each for each in self._sets if each.env == env), None)
        if chosen is not None:
            self._sets.remove(chosen)
        else:
            for old in self._sets[: len(self._sets) - MAX_SETS + 1]:
                self._end(old)
            self._count += 1
            chosen = Set(env, self._folder / str(self._count))
            chosen.folder.mkdir(mode=0o700)
        self._sets.append(chosen)
        return chosen

    def obstacle(self, warmth: Warmth) -> str | None:
        """None while servers load, "" once they are ready, else why they cannot serve this script."""
        needed = [*self._sets[-1].servers[: warmth.count], *([self._agent] if self._agent else [])]
        if problem := next((server.problem for server in needed if server.problem), ""):
            return problem
        if any(server.waiting for server in needed):
            return None if time.monotonic() < self._since + LOADING_S else f"warm servers took more than {LOADING_S:.0f} s to import"
        if self._vanished():
            if not self._again:
                return "the warm servers vanish as soon as they are started"
            self._again = False
            self._prepare(warmth)
            return None
        return shadowed(warmth.folder, needed[0].modules)

    # ---- ending

    def close(self) -> None:
        """Kills every server and waits until it is gone. Between runs all that descends from the supervisor is a server."""
        for server in self._all():
            self._drop(server)
        self._agent, self._sets = None, []
        until = time.monotonic() + LEAVE_S
        while (alive := proctable.descendants(proctable.snapshot(), os.getpid())) and time.monotonic() < until:
            for process in alive:
                proctable.send(process, signal.SIGKILL)
            time.sleep(0.005)
            _reap()
        if self._folder != Path():
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = Path()

    def _end(self, old: Set) -> None:
        """Makes room: the set that was not used for longest."""
        self._sets.remove(old)
        for server in old.servers:
            self._drop(server)
            if process := proctable.read(server.pid):
                proctable.send(process, signal.SIGKILL)

    def _drop(self, server: Server) -> None:
        if server.control >= 0:
            self._unwatch(server.ready)
            os.close(server.control)
            os.close(server.ready)
            server.control = server.ready = -1

    # ---- starting

    def _start(self, chosen: Set) -> None:
        """The very first server brings the agent's along: forked off it after `import torch`."""
        server, arguments, inherited = self._open(chosen.folder / str(len(chosen.servers)))
        chosen.servers.append(server)
        if self._agent is None:
            self._agent, more, also = self._open(self._folder / AGENT)
            self._agent.waiting = 1
            arguments, inherited = [*arguments, *more], [*inherited, *also]
        with open(self._folder / "log", "ab") as log:
            process = subprocess.Popen(
                [self._python, "-u", "-c", BOOT, str(LAUNCH_DIR / "warm_server.py"), *arguments],
                env=dict(chosen.env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=inherited, start_new_session=True,
            )  # fmt: skip
        process.returncode = 0  # reaped by the supervisor
        server.pid = process.pid
        for descriptor in inherited:
            os.close(descriptor)

    def _open(self, socket_path: Path) -> tuple[Server, list[str], list[int]]:
        """A server's pipes: its record, its arguments, and the ends that it inherits."""
        control_read, control = os.pipe()
        ready, ready_write = os.pipe()
        server = Server(control, ready, socket_path)
        self._watch(ready, lambda: self._on_ready(server))
        return server, [str(socket_path), str(control_read), str(ready_write)], [control_read, ready_write]

    def _ask(self, server: Server, names: tuple[str, ...]) -> None:
        missing = [name for name in names if name not in server.asked]
        if missing or not server.asked:
            server.asked.update(("", *missing))
            server.waiting += 1
            with contextlib.suppress(OSError):
                os.write(server.control, (json.dumps({"preload": missing}) + "\n").encode())

    def _on_ready(self, server: Server) -> None:
        chunk = os.read(server.ready, 1 << 16)
        *lines, server.partial = (server.partial + chunk).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            server.pid, server.problem, server.modules = answer["pid"], answer["problem"], set(answer["modules"])
            server.waiting -= 1
        if not chunk:
            server.problem = server.problem or f"a warm server died: {self._last_words()}"
            self._drop(server)

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = (self._folder / "log").read_text("utf-8", "replace").strip().splitlines()
            return lines[-1][:200] if lines else "it said nothing"
        return "it said nothing"


def server_environment(warmth: Warmth) -> dict[str, str]:
    """What a rank will see, as far as it is known before the run; complete before torch is imported."""
    own = {name: value for name, value in warmth.env.items() if not name.startswith("_HARNESS_")}  # read by the probe, after the fork
    env = {**clean_environment(os.environ), **own, ENV_RUN_ID: MARK}
    if warmth.count > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # torchrun's command line does this, not its agent
    return env


def _private_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="harness-")
    if len(folder) > MAX_FOLDER_PATH:
        os.rmdir(folder)  # noqa: PTH106
        folder = tempfile.mkdtemp(prefix="harness-", dir="/tmp")
    return Path(folder)


def shadowed(folder: str, modules: set[str]) -> str:
    """A file beside the script that a fresh interpreter would import in place of a preloaded module."""
    with contextlib.suppress(OSError):
        for entry in sorted(os.listdir(folder)):  # noqa: PTH208
            name = entry.removesuffix(".py")
            if name in modules and name != "__main__" and (entry.endswith(".py") or Path(folder, entry, "__init__.py").exists()):
                return f"{entry} beside the script bears the name of a module that torch uses"
    return ""


def _lives(pid: int) -> bool:
    process = proctable.read(pid)
    return process is not None and process.alive


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
