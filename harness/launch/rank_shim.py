"""Starts one rank, keeps its output and its exit code. Runs under `python -I -S`: stdlib only, no package of ours.

    rank_shim.py RUN_DIR [--foreground] -- COMMAND...

torchrun's agent reaps a rank and keeps only the first failure; this process stands between them and reports pid and exit of *its* rank on
the run's FIFO. The rank is a session leader, as under torchrun; it gets every signal that the shim gets, and the shim ends as the
rank ended, so that the agent sees what it would have seen. A shim that is killed takes its rank along.
"""

# ruff: noqa: PTH103, PTH118, SIM105
# Every launch waits for two of these in a row, so nothing is imported that imports much: no json, re, enum, typing, contextlib, pathlib
# (55 ms of CPU fall to 20 ms). _signal is signal without its enums.

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import os
import sys
import time

RANK_PREFIX = "_HARNESS_RANK_"  # the agent's environment holds the ranks' additions under this prefix, so that it is not probed itself
FIFO = "ranks.fifo"
ENV_FIFO = "_HARNESS_FIFO"  # path of the FIFO where it lies elsewhere than in the run folder: a pipe is this node's, the folder may be all nodes'
ENV_AGENT_PID = "_HARNESS_AGENT_PID"  # whom the script has to see as its parent (probe/bootstrap.py); it is this process's
LOG_DIR = "logs"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1


def report(run_dir: str, event: dict[str, object]) -> None:
    """One line of JSON (numbers and lists of numbers print as such) on the supervisor's FIFO; without a reader it is dropped."""
    line = "{" + ", ".join(f'"{name}": {value}' for name, value in event.items()) + "}\n"
    try:
        fifo = os.open(os.environ.get(ENV_FIFO) or os.path.join(run_dir, FIFO), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.write(fifo, line.encode())
        os.close(fifo)
    except OSError:  # the supervisor is dead
        pass


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot: with the pid it names one process for ever."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[19])


def die_with_parent(parent: int) -> None:
    """SIGKILL when the parent dies, whatever the script does with signals; kept over exec, not inherited by its children."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(128 + signal.SIGKILL)


def open_log(run_dir: str, rank: int) -> int:
    folder = os.path.join(run_dir, LOG_DIR)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return os.open(os.path.join(folder, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def free_port() -> int:
    probe = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    probe.bind(("127.0.0.1", 0))
    port: int = probe.getsockname()[1]
    probe.close()
    return port


def rank_environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(RANK_PREFIX) and name != ENV_FIFO}
    env.update((name.removeprefix(RANK_PREFIX), value) for name, value in os.environ.items() if name.startswith(RANK_PREFIX))
    env[ENV_AGENT_PID] = str(os.getppid())
    if env.get("WORLD_SIZE") == "1":
        # A lone rank may be a script that spawns its ranks itself on a port of its own: told of the agent's store, they would all wait for one.
        env.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        env["MASTER_PORT"] = str(free_port())
    return env


def execute(command: list[str], env: dict[str, str], log: int | None, parent: int) -> None:
    """In the forked child: become the rank. Returns only by exception."""
    if log is not None:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
    die_with_parent(parent)
    for number in (*FORWARDED, signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter ignores the last two; exec would hand that on
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execvpe(command[0], command, env)


def spawn(command: list[str], env: dict[str, str], log: int | None) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        execute(command, env, log, parent)
    except BaseException as error:
        os.write(2, f"harness: {command[0]}: {error}\n".encode())
    os._exit(127)


def send(pid: int, number: int, leader: bool) -> None:
    try:
        os.killpg(pid, number) if leader else os.kill(pid, number)
    except ProcessLookupError:
        pass


def wait(pid: int, leader: bool) -> tuple[int, list[int]]:
    """The exit code as waitpid gives it, and the signals passed on before; signals are blocked but where they are waited for."""
    passed: list[int] = []
    while True:
        number = signal.sigwait((signal.SIGCHLD, *FORWARDED))
        if number != signal.SIGCHLD:
            passed.append(number)
            send(pid, number, leader)
            continue
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), passed


def end_like(code: int) -> None:
    """Ends as the rank ended; no second core dump."""
    if code >= 0:
        os._exit(code)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def main(argv: list[str]) -> None:
    run_dir, command = argv[0], argv[argv.index("--") + 1 :]
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, *FORWARDED))
    env = rank_environment()
    rank = int(env["RANK"])
    foreground = "--foreground" in argv[: argv.index("--")]
    pid = spawn(command, env, None if foreground else open_log(run_dir, rank))
    report(run_dir, {"rank": rank, "local_rank": int(env["LOCAL_RANK"]), "pid": pid, "ticks": start_ticks(pid)})
    code, passed = wait(pid, leader=not foreground)
    report(run_dir, {"rank": rank, "pid": pid, "code": code, "time_ns": time.time_ns(), "passed": passed})
    end_like(code)


if __name__ == "__main__":
    main(sys.argv[1:])
