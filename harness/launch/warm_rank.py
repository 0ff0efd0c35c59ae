"""What a forked child does to be what a fresh `python -u SCRIPT` is. Loaded by warm_server.py before anything of torch."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import io
import os
import signal
import sys
import time
import types
from dataclasses import dataclass
from typing import Any

ENV_RUN_ID, ENV_PROBE_DIR = "_HARNESS_RUN_ID", "_HARNESS_PROBE_DIR"
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_libc.getenv.restype = ctypes.c_void_p
_mark = _libc.getenv(ENV_RUN_ID.encode())  # in the block that /proc/<pid>/environ shows; os.environ writes elsewhere
_mark_bytes = len(os.environ.get(ENV_RUN_ID, ""))


@dataclass
class Task:
    argv: list[str]
    cwd: str
    env: dict[str, str]
    streams: list[int]
    parent: int


def start_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[19])


def unsafe_to_fork() -> str:
    """Why this process must not fork ranks; empty where it may.

    A rehearsal comes first: a library that is prepared for fork (OpenBLAS in numpy) ends its threads then, and starts them when needed.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    num_threads = _num_threads_settled()
    if num_threads != 1:
        return f"{num_threads} threads run after the imports"
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(("/dev/nvidia", "/dev/kfd")):  # noqa: PTH115
                return "a GPU was opened by the imports"
    return ""


def _num_threads_settled() -> int:
    """A thread that was joined stands in /proc until the kernel has taken it down: one that stays is one that runs."""
    for _ in range(20):
        num_threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
        if num_threads == 1:
            break
        time.sleep(0.005)
    return num_threads


def become(task: Task) -> None:
    """Never returns normally but for a script that came to its end; SystemExit and the like leave through the interpreter's own end."""
    _take_identity(task)
    _take_environment(task)
    _reseed()
    _arm_probe(task)
    run(task.argv[0])


def _take_identity(task: Task) -> None:
    os.setsid()
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != task.parent:
        os._exit(128 + signal.SIGKILL)
    for target, stream in enumerate(task.streams):
        os.dup2(stream, target)
    for stream in task.streams:
        if stream > 2:
            os.close(stream)
    import multiprocessing.process as process
    import threading

    getattr(threading.main_thread(), "_set_native_id", lambda: None)()
    process.current_process()._config["authkey"] = process.AuthenticationString(os.urandom(32))  # type: ignore[attr-defined]


def _take_environment(task: Task) -> None:
    run_id = task.env.get(ENV_RUN_ID, "").encode()
    if _mark and 0 < len(run_id) <= _mark_bytes:  # so that the mark of the run stands in /proc/<pid>/environ, as after an exec
        ctypes.memmove(_mark, run_id + b"\0" * (_mark_bytes - len(run_id)), _mark_bytes)
    for name in set(os.environ) - set(task.env):
        del os.environ[name]
    os.environ.update(task.env)
    os.chdir(task.cwd)
    sys.argv = task.argv
    sys.orig_argv = [sys.executable, "-u", *task.argv]
    if "RANK" not in task.env:  # torchrun's agent: its script stands in our folder, which nobody imports from
        return
    sys.path.insert(0, os.path.dirname(os.path.realpath(task.argv[0])))  # noqa: PTH120


def _reseed() -> None:
    """Generators that a fresh process seeds from the system; `random` does so itself after a fork, CUDA's default seed is fixed anyway."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def preload_probe(folder: str) -> None:
    """In the server: the probe's modules, so that no rank reads, unmarshals and runs eighty of them (60 ms of CPU a rank). Nothing is armed."""
    try:
        _bootstrap(folder).preload()
    except Exception as error:  # each rank tries it by itself then, and tells what is wrong
        os.write(2, f"harness: the probe was not preloaded: {error!r}\n".encode())


def _arm_probe(task: Task) -> None:
    folder = task.env.get(ENV_PROBE_DIR, "")
    if ENV_PROBE_DIR not in task.env or not os.path.exists(os.path.join(folder, "bootstrap.py")):  # noqa: PTH110, PTH118
        return
    try:
        _bootstrap(folder).arm_from_environment()
    except Exception as error:  # the script runs all the same; the verdict will say that the rank did not report
        os.write(2, f"harness: the probe did not arm: {error!r}\n".encode())


def _bootstrap(folder: str) -> Any:
    """The probe's loader, by its path: no name of ours is importable in a rank."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("_harness_probe_bootstrap", os.path.join(folder, "bootstrap.py"))  # noqa: PTH118
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(path: str) -> None:
    """The script as `__main__`, as the interpreter itself would run it."""
    code = _compiled(path)
    main = types.ModuleType("__main__")
    main.__dict__.update(_main_names(path))
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing's second name for it, from its import on
        sys.modules["__mp_main__"] = main
    try:
        exec(code, main.__dict__)
    except SystemExit as error:
        failures = sys.modules.get("_harness_probe.failures")
        if failures and failures.S.recorder is not None:  # armed, not only preloaded; a fresh interpreter cannot tell: nobody sees the exception there
            failures.record_system_exit(error)
        raise
    except BaseException as error:
        _report(error)
        raise


def _main_names(path: str) -> dict[str, Any]:
    from importlib.machinery import SourceFileLoader

    file = os.path.abspath(path)  # noqa: PTH100
    return {
        "__file__": file,
        "__builtins__": builtins,
        "__loader__": SourceFileLoader("__main__", file),
        "__spec__": None,
        "__cached__": None,
        "__annotations__": {},
    }


def _compiled(path: str) -> types.CodeType:
    file = os.path.abspath(path)  # noqa: PTH100
    try:
        with io.open_code(file) as source:
            text = source.read()
    except OSError as error:
        os.write(2, f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}\n".encode())
        raise SystemExit(2) from None
    try:
        return compile(text, file, "exec", dont_inherit=True)
    except BaseException as error:
        _report(error)
        raise


def _report(error: BaseException) -> None:
    """Prints the traceback without our frames; then the exception goes on, silently, so that the interpreter ends as it always does."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith("<harness "):
        frames = frames.tb_next
    error.__traceback__ = frames
    sys.excepthook(type(error), error, frames)
    sys.excepthook = lambda *_: None
