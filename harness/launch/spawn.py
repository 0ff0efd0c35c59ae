"""Starts the one process of a command: its own session, no terminal (but a foreground rank), ended by the kernel when we die."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from harness.launch.command import AGENT_LOG, INHERITED, INHERITED_PREFIXES, Command
from harness.launch.warm_wire import ENV_SERVERS
from harness.probe.protocol import LOG_DIR

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec only the call itself is safe


def become_subreaper() -> None:
    """From now on every orphan below us becomes our child instead of init's: nothing of a run escapes by a double fork."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def clean_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Without what an older job or a run of ours around this one left behind."""
    return {name: value for name, value in inherited.items() if name not in INHERITED and not name.startswith(INHERITED_PREFIXES)}


def start(command: Command, run_dir: Path, terminal: tuple[int, ...], servers: str = "") -> subprocess.Popen[bytes]:
    """Starts it; OSError where the program or the folder does not exist."""
    env = {**clean_environment(os.environ), **command.env, **({ENV_SERVERS: servers} if servers else {})}
    if command.foreground and terminal:
        streams = dict(zip(("stdin", "stdout", "stderr"), terminal, strict=True))
        return subprocess.Popen(command.argv, env=env, cwd=command.cwd, preexec_fn=_end_with_us, **streams)  # type: ignore[call-overload,no-any-return]
    with open(open_private(run_dir / LOG_DIR / AGENT_LOG), "ab") as log:
        return subprocess.Popen(
            command.argv, env=env, cwd=command.cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, preexec_fn=_end_with_us,
        )  # fmt: skip


def open_private(path: Path) -> int:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _end_with_us() -> None:
    """SIGTERM when the supervisor dies, so that even its SIGKILL ends the gang."""
    _prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
