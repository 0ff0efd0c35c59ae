"""The warm servers of a supervisor: started when a run first needs them, kept for the next run, ended with the supervisor."""

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
LEAVE_S = 2.0
MAX_SOCKET_PATH = 90  # the kernel allows 107 bytes
MARK = "-" * 64  # room for a run id in /proc/<pid>/environ of a forked rank


@dataclass
class Server:
    """One preloaded interpreter as the supervisor sees it; `problem` is None while it loads."""

    control: int
    ready: int
    pid: int = 0
    asked: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    waiting: int = 0  # answers that have not come yet
    problem: str = ""
    partial: bytes = b""


class Pool:
    def __init__(self, watch: Callable[[int, Callable[[], None]], None], unwatch: Callable[[int], None]) -> None:
        self._watch, self._unwatch = watch, unwatch
        self._servers: dict[str, Server] = {}
        self._folder = ""
        self._key: tuple[str, tuple[tuple[str, str], ...]] | None = None
        self._since = 0.0

    @property
    def folder(self) -> str:
        return self._folder

    def pids(self) -> set[int]:
        return {server.pid for server in self._servers.values()}

    def prepare(self, warmth: Warmth) -> None:
        """Starts what is missing; a server started under another environment is of no use and is replaced."""
        env = _server_environment(warmth)
        key = (warmth.python, tuple(sorted(env.items())))
        if key != self._key or any(server.problem for server in self._servers.values()):
            self.close()
            self._key, self._folder = key, _private_folder()
        self._since = time.monotonic()
        for local_rank in range(warmth.count):
            name = str(local_rank)
            if name not in self._servers:
                self._start(name, warmth.python, env)
            self._ask(self._servers[name], warmth.preload)

    def obstacle(self, warmth: Warmth) -> str | None:
        """None while servers load, "" once they are ready, else why they cannot serve this script."""
        servers = [self._servers[name] for name in (AGENT, *map(str, range(warmth.count))) if name in self._servers]
        if problem := next((server.problem for server in servers if server.problem), ""):
            return problem
        if any(server.waiting for server in servers):
            return None if time.monotonic() < self._since + LOADING_S else f"warm servers took more than {LOADING_S:.0f} s to import"
        return _shadowed(warmth.folder, servers[-1].modules)

    def close(self) -> None:
        """Kills every server and waits until it is gone. Between runs all that descends from the supervisor is a server."""
        for server in self._servers.values():
            self._drop(server)
        self._servers.clear()
        until = time.monotonic() + LEAVE_S
        while (alive := proctable.descendants(proctable.snapshot(), os.getpid())) and time.monotonic() < until:
            for process in alive:
                proctable.send(process, signal.SIGKILL)
            time.sleep(0.005)
            _reap()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._key, self._folder = None, ""

    def _drop(self, server: Server) -> None:
        if server.control >= 0:
            self._unwatch(server.ready)
            os.close(server.control)
            os.close(server.ready)
            server.control = server.ready = -1

    def _start(self, name: str, python: str, env: Mapping[str, str]) -> None:
        """The first server brings the agent's along: forked off it after `import torch`."""
        names = [name] if self._servers else [name, AGENT]
        arguments: list[str] = []
        inherited: list[int] = []
        for each in names:
            control_read, control = os.pipe()
            ready, ready_write = os.pipe()
            self._servers[each] = server = Server(control, ready, waiting=1 if each == AGENT else 0)
            self._watch(ready, lambda server=server: self._on_ready(server))  # type: ignore[misc]
            arguments += [*([AGENT] if each == AGENT else []), f"{self._folder}/{each}", str(control_read), str(ready_write)]
            inherited += [control_read, ready_write]
        with open(f"{self._folder}/log", "ab") as log:
            process = subprocess.Popen(
                [python, "-u", str(LAUNCH_DIR / "warm_server.py"), *arguments],
                env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=inherited, start_new_session=True,
            )  # fmt: skip
        process.returncode = 0  # reaped by the supervisor
        self._servers[name].pid = process.pid
        for descriptor in inherited:
            os.close(descriptor)

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
            lines = Path(self._folder, "log").read_text("utf-8", "replace").strip().splitlines()
            return lines[-1][:200] if lines else "it said nothing"
        return "it said nothing"


def _server_environment(warmth: Warmth) -> dict[str, str]:
    """What a rank will see, as far as it is known before the run; complete before torch is imported."""
    env = {**clean_environment(os.environ), **warmth.env, ENV_RUN_ID: MARK}
    if warmth.count > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # torchrun's command line does this, not its agent
    return env


def _private_folder() -> str:
    folder = tempfile.mkdtemp(prefix="harness-")
    if len(folder) <= MAX_SOCKET_PATH:
        return folder
    Path(folder).rmdir()
    return tempfile.mkdtemp(prefix="harness-", dir="/tmp")


def _shadowed(folder: str, modules: set[str]) -> str:
    """A file beside the script that a fresh interpreter would import in place of a preloaded module."""
    with contextlib.suppress(OSError):
        for entry in sorted(os.listdir(folder)):  # noqa: PTH208
            name = entry.removesuffix(".py")
            if name in modules and name != "__main__" and (entry.endswith(".py") or Path(folder, entry, "__init__.py").exists()):
                return f"{entry} beside the script bears the name of a module that torch uses"
    return ""


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
