"""The owner of every rank on this node: a small process without torch, started by the controller, in a session of its own.

It reads commands from stdin and tells events on stdout (see job.py). The end of stdin means that the controller is gone, however it died:
the gang is ended and the supervisor leaves. It is a subreaper, so an orphan of a run becomes its child and cannot escape; Ctrl-C in the
terminal does not reach it. Runs come one after another; warm servers live on between them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from harness.launch import job as wire
from harness.launch import spawn
from harness.launch.gang import Gang
from harness.launch.pool import Pool
from harness.probe.protocol import SUPERVISOR_FILE

IDLE_S, ENDING_S = 1.0, 0.02


class Supervisor:
    def __init__(self, terminal: tuple[int, ...]) -> None:
        self._terminal = terminal
        self._gang: Gang | None = None
        self._leaving = False
        self._partial = b""
        self._took_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._watch(0, self._on_stdin)
        self._wakeup = _wake_on_signals()
        self._watch(self._wakeup, self._on_signal)
        self._pool = Pool(self._watch, self._unwatch)

    def _watch(self, descriptor: int, call: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, call)

    def _unwatch(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def serve(self) -> None:
        """Until the controller is gone or says so, and nothing runs any more."""
        while not (self._leaving and self._gang is None):
            for key, _ in self._selector.select(self._patience()):
                key.data()
            self._reap()
            self._each_turn()
            if self._gang is not None:
                self._advance(self._gang)
        self._pool.close()

    def _each_turn(self) -> None:
        """For a supervisor that does more: called at least once a second."""

    def _patience(self) -> float:
        """While something ends we look often, but for a fifth of the time at most: a host may have thousands of processes."""
        return max(ENDING_S, 4 * self._took_s) if self._gang is not None and self._gang.pressing else IDLE_S

    def _advance(self, gang: Gang) -> None:
        begun = time.monotonic()
        self._step(gang)
        self._took_s = time.monotonic() - begun

    def _step(self, gang: Gang) -> None:
        if gang.waiting and gang.job.command.warmth is not None:
            obstacle = self._pool.obstacle(gang.job.command.warmth)
            if obstacle:
                gang.fall_back(obstacle)
            elif obstacle is not None:
                gang.start(gang.job.command, self._pool.folder)
        gang.tick()
        if gang.ended:
            self._unwatch(gang.fifo)
            gang.close()
            self._gang = None

    def _on_stdin(self) -> None:
        chunk = os.read(0, 1 << 16)
        if not chunk:
            self._unwatch(0)
            return self._leave("controller died")
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))
        return None

    def _obey(self, order: dict[str, Any]) -> None:
        if order["do"] == wire.RUN:
            self._run(wire.parse_job(order))
        elif order["do"] == wire.STOP and self._gang is not None:
            self._gang.stop(order["reason"])
        elif order["do"] == wire.CLOSE:
            self._leave("interrupted")

    def _run(self, job: wire.Job) -> None:
        try:
            self._gang = gang = Gang(job, self._tell, self._pool.pids, self._terminal)
        except OSError as error:  # the run folder cannot be written
            return self._tell(wire.never_launched(f"{error.filename or job.run_dir}: {error.strerror}"))
        self._watch(gang.fifo, gang.on_fifo)
        if job.command.warmth is None:
            gang.start(job.command)
        else:
            self._pool.prepare(job.command.warmth)
        return None

    def _leave(self, reason: str) -> None:
        self._leaving = True
        if self._gang is not None:
            self._gang.stop(reason)

    def _on_signal(self) -> None:
        if signal.SIGTERM in os.read(self._wakeup, 4096):
            self._leave("interrupted")

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if self._gang is not None:
                    self._gang.on_child(found[0], os.waitstatus_to_exitcode(found[1]))

    def _tell(self, event: dict[str, Any]) -> None:
        """To the controller, if it still lives, and to the run folder, if that still exists."""
        line = json.dumps(event) + "\n"
        with contextlib.suppress(OSError):
            os.write(1, line.encode())
        if self._gang is None:
            return
        if not self._gang.run_dir.is_dir():  # deleted: not to be made again by a line of ours
            return
        with contextlib.suppress(OSError):
            log = spawn.open_private(self._gang.run_dir / SUPERVISOR_FILE)
            os.write(log, (json.dumps({"t": time.time_ns(), **event}) + "\n").encode())
            os.close(log)


def _wake_on_signals() -> int:
    """A pipe that becomes readable when a child ends or SIGTERM comes."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # never SIG_IGN: the ranks would inherit that
        signal.signal(number, lambda *_: None)
    return reader


def main(arguments: list[str]) -> None:
    """`arguments`: the descriptors of the controller's terminal, or nothing."""
    spawn.become_subreaper()
    Supervisor(tuple(int(word) for word in arguments)).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
