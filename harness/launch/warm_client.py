"""Stands where torchrun's agent expects a rank: hands the rank to its preloaded server and mirrors signals and the exit. No torch.

    warm_client.py RUN_DIR [--agent] -- PYTHON [-u] SCRIPT ARGUMENTS...

Runs under `python -I -S`. If it dies, the server sees the end of the socket and ends the rank; if the server dies, the rank dies with it.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import os
import select
import sys
import time

TYPE_CHECKING = False  # typing and collections.abc cost 15 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120

from harness.launch import rank_shim, warm_wire  # noqa: E402


def connect(path: str) -> _socket.socket:
    peer = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    peer.connect(path)
    return peer


def wake_on_signals() -> int:
    """A descriptor from which the numbers of arrived signals are read."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in rank_shim.FORWARDED:
        signal.signal(number, lambda *_: None)
    return reader


def mirror(peer: _socket.socket, signals: int) -> tuple[int, list[int]]:
    """Passes signals on until the rank has ended: its exit code, and what was passed."""
    passed: list[int] = []
    while True:
        waited: list[Any] = [peer, signals]
        ready, _, _ = select.select(waited, [], [])
        if signals in ready:
            for number in os.read(signals, 64):
                passed.append(number)
                warm_wire.send(peer, {"signal": number})
        if peer in ready:
            message, _ = warm_wire.receive(peer)
            if message is None:
                return -signal.SIGKILL, passed  # the server died, and the rank with it
            return message["code"], passed


def main(argv: list[str]) -> None:
    run_dir, options, command = argv[0], argv[1 : argv.index("--")], argv[argv.index("--") + 1 :]
    signals = wake_on_signals()
    script = command[2:] if command[1] == "-u" else command[1:]
    if "--agent" in options:
        agent = f"{os.environ[warm_wire.ENV_SERVERS]}/../{warm_wire.AGENT}"
        code, _ = hand_over(dict(os.environ), agent, script, (0, 1, 2), signals, lambda _: None)
    else:
        code = run_rank(run_dir, script, signals)
    rank_shim.end_like(code)


def run_rank(run_dir: str, script: list[str], signals: int) -> int:
    """A rank of the run: its output goes to its log, its pid and its exit to the supervisor."""
    folder = os.environ.pop(warm_wire.ENV_SERVERS)
    env = rank_shim.rank_environment()
    who = {"rank": int(env["RANK"]), "local_rank": int(env["LOCAL_RANK"])}
    log = rank_shim.open_log(run_dir, who["rank"])
    born: dict[str, Any] = {}

    def on_birth(event: dict[str, Any]) -> None:
        born.update(event)
        rank_shim.report(run_dir, {**who, **born})

    code, passed = hand_over(env, f"{folder}/{who['local_rank']}", script, (0, log, log), signals, on_birth)
    rank_shim.report(run_dir, {**who, **born, "code": code, "time_ns": time.time_ns(), "passed": passed})
    return code


def hand_over(
    env: dict[str, str], server: str, script: list[str], streams: tuple[int, ...], signals: int, on_birth: Callable[[dict[str, Any]], None]
) -> tuple[int, list[int]]:
    peer = connect(server)
    warm_wire.send(peer, {"argv": script, "cwd": os.getcwd(), "env": env}, streams)  # noqa: PTH109
    born, _ = warm_wire.receive(peer)
    if born is None:
        sys.exit("harness: the warm server is gone")
    on_birth(born)
    return mirror(peer, signals)


if __name__ == "__main__":
    main(sys.argv[1:])
