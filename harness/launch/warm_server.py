"""A preloaded interpreter that forks ranks. Started by the supervisor as `python -u -c BOOT THIS_FILE SOCKET CONTROL READY [...]`.

It must be what a fresh interpreter is up to the first line of the script, so everything that Python or torch fixes at start is put right in
the child: environment, folder, argv, path, generators, process identity. It holds one thread and no CUDA context when it forks; if a
preloaded library breaks that, it says so and the supervisor uses torchrun. The child leaves through the normal end of this file, so that
threads, atexit handlers, buffers and exit codes are the interpreter's own business, as in any script.

CONTROL brings {"preload": [...]} lines and, at its end, the order to leave; READY takes one {"pid", "problem", "modules"} line for each.
With three more of these, the server that serves torchrun's agent is forked off once torch is imported: one import less to wait for.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # the folder that -c brings: a rank's path begins with its script's

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
from typing import Any, NoReturn


def _load(name: str) -> Any:
    """A sibling of this file under private names, so that neither a rank's modules nor its stacks show anything of ours as the user's."""
    import types

    module = types.ModuleType(f"_harness_{name}")
    sys.modules[module.__name__] = module
    with open(f"{os.path.dirname(os.path.abspath(__file__))}/{name}.py", encoding="utf-8") as source:  # noqa: PTH100, PTH120
        exec(compile(source.read(), f"<harness {name}>", "exec"), module.__dict__)
    return module


wire = _load("warm_wire")
rank = _load("warm_rank")
end = _load("warm_end")
atexit.register(end.spare_preloaded)  # before any other, so it runs last
PROBE = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}/probe"  # noqa: PTH100, PTH120
# With what the agent would import only when it runs; 60 ms of each launch.
AGENT_MODULES = (
    "torch",
    "torch.distributed.run",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
)


class Server:
    """Waits for preload orders and for one client at a time."""

    def __init__(self, path: str, control: int, ready: int, probe: str = "") -> None:
        self.path, self.control, self.ready, self.probe = path, control, ready, probe
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(8)
        self._partial = b""

    def preload(self, names: list[str], problem: str = "") -> None:
        """Imports, then proves that a fork is safe. Without the collector, which takes a sixth of the time of an import of torch."""
        gc.disable()
        for name in names:
            try:
                __import__(name)
            except BaseException as error:
                problem = f"import {name}: {type(error).__name__}: {error}"
                break
        if self.probe:
            rank.preload_probe(self.probe)
        gc.enable()
        end.note_preloaded()
        gc.freeze()  # a rank's collector walks, and so copies, nothing of ours: 2.2 s of CPU at its end fall to 0.6 s
        self.tell(problem or rank.unsafe_to_fork())

    def tell(self, problem: str) -> None:
        known = sorted({name.partition(".")[0] for name in sys.modules})
        line = json.dumps({"pid": os.getpid(), "problem": problem, "modules": known}) + "\n"
        os.write(self.ready, line.encode())

    def serve(self) -> Any:
        """Runs until the supervisor leaves (None), or, in a forked child, returns what that child has to be."""
        waited: list[Any] = [self.control, self.listener]
        while True:
            readable, _, _ = select.select(waited, [], [])
            if self.control in readable and not self.obey():
                return None
            if self.listener in readable:
                peer, _ = self.listener.accept()
                with peer:
                    if task := self.attend(peer):
                        return task

    def obey(self) -> bool:
        chunk = os.read(self.control, 1 << 16)
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        for line in lines:
            self.preload(json.loads(line)["preload"])
        return bool(chunk)

    def attend(self, peer: socket.socket) -> Any:
        """One client: forks its rank and stays with it to the end. In the child: the task."""
        message, streams = wire.receive(peer, num_descriptors=3)
        if message is None:
            return None
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.forget(peer)
            return rank.Task(message["argv"], message["cwd"], message["env"], streams, parent)
        for stream in streams:
            os.close(stream)
        self.follow(peer, pid)
        return None

    def forget(self, peer: socket.socket) -> None:
        """In the child: none of the server's descriptors lives on in a rank."""
        peer.close()
        self.listener.close()
        os.close(self.control)
        os.close(self.ready)

    def follow(self, peer: socket.socket, pid: int) -> None:
        pin = os.pidfd_open(pid)
        wire.send(peer, {"pid": pid, "ticks": rank.start_ticks(pid)})
        waited: list[Any] = [pin, peer]
        while pin not in select.select(waited, [], [])[0]:
            if not self.pass_on(peer, pid):
                waited.remove(peer)
        os.close(pin)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            wire.send(peer, {"code": code})

    def pass_on(self, peer: socket.socket, pid: int) -> bool:
        """A signal for the rank; the client's end is the rank's end."""
        try:
            message, _ = wire.receive(peer)
        except (OSError, EOFError):
            message = None
        number = signal.SIGKILL if message is None else message["signal"]
        for deliver in (os.killpg, os.kill):  # until the child has its own session there is no such group
            with contextlib.suppress(ProcessLookupError):
                deliver(pid, number)
                break
        return message is not None

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)  # noqa: PTH108
            os.rmdir(os.path.dirname(self.path))  # noqa: PTH106, PTH120  (the last one out, where the supervisor was killed)


def start(arguments: list[str]) -> Server:
    """The server of this process: of a rank, or, after a fork, of the agent."""
    own = arguments[0], int(arguments[1]), int(arguments[2])
    if len(arguments) == 3:
        return Server(*own, PROBE)
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(own[1], 1)
    names = json.loads(line)["preload"]
    if "torch" in names:
        gc.disable()
        with contextlib.suppress(Exception):  # a broken torch is told by the preload below
            __import__("torch")
    agent = arguments[3], int(arguments[4]), int(arguments[5])
    if fork_away():
        for descriptor in own[1:]:
            os.close(descriptor)
        server = Server(*agent)
        with contextlib.suppress(Exception):
            rehearse()
        server.preload(list(AGENT_MODULES))
        return server
    for descriptor in agent[1:]:
        os.close(descriptor)
    server = Server(*own, PROBE)
    server.preload(names)
    return server


def rehearse() -> None:
    """What the agent computes once and then keeps."""
    from torch.distributed.run import get_args_parser

    get_args_parser()


def fork_away() -> bool:
    """True in a new process that is nobody's child but the supervisor's."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return False
    if os.fork():
        os._exit(0)
    return True


def main() -> Any:
    server = start(sys.argv[1:])
    task = server.serve()
    if task is None:
        server.leave()
    return task


def leave_quickly() -> NoReturn:
    """The server itself: nothing to finish, and taking torch apart would cost half a second."""
    os._exit(0)


task = main()
if task is None:
    leave_quickly()
end.leave_at_once()
try:
    rank.become(task)
except SystemExit as leave:
    end.expect(leave.code)
    raise
end.expect(None)
