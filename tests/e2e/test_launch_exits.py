"""A forked rank ends as python ends, and dies with whoever holds it. One server without torch and without an agent: 0.1 s a case."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.launch import proctable
from harness.launch.command import LAUNCH_DIR
from harness.launch.pool import BOOT
from harness.launch.warm_wire import ENV_SERVERS

EXITS = """
import atexit, os, signal, sys, threading, time
atexit.register(lambda: print("atexit ran"))
mode = sys.argv[1]
if os.environ.get("RANK", "0") == "1":
    sys.exit(0)
print("before", __name__, flush=True)
def deep():
    raise ValueError("bad value")
if mode == "normal": pass
elif mode == "number": sys.exit(3)
elif mode == "text": sys.exit("no such data")
elif mode == "none": sys.exit()
elif mode == "hard": os._exit(7)
elif mode == "raise": deep()
elif mode == "chained":
    try: deep()
    except ValueError as error: raise RuntimeError("while training") from error
elif mode == "kill": os.kill(os.getpid(), signal.SIGKILL)
elif mode == "segv": os.kill(os.getpid(), signal.SIGSEGV)
elif mode == "interrupt": os.kill(os.getpid(), signal.SIGINT); time.sleep(10)
elif mode == "unflushed": sys.stdout.write("no newline at the end")
elif mode == "thread":
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread ended"))).start()
elif mode == "thread_raises":
    threading.Thread(target=deep).start()
elif mode == "hook":
    sys.excepthook = lambda kind, value, trace: print("hook saw", kind.__name__, value)
    deep()
elif mode == "delete":
    class Last:
        def __del__(self): print("deleted")
    last = Last()
"""
MODES = ("normal", "number", "text", "none", "hard", "raise", "chained", "kill", "segv", "interrupt", "unflushed", "thread",
         "thread_raises", "hook", "delete")  # fmt: skip

WAITING = """
import os, signal, sys, time
def handler(number, frame):
    print("signal", number)
    sys.exit(5)
signal.signal(signal.SIGUSR1, handler)
open("pid", "w").write(str(os.getpid()))
while True:
    time.sleep(0.02)
"""


@dataclass
class Server:
    """A running warm server, and its clients."""

    process: subprocess.Popen[bytes]
    sockets: Path
    run_dir: Path

    def client(self, folder: Path, *argv: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", ENV_SERVERS: str(self.sockets)}
        command = [sys.executable, "-I", "-S", str(LAUNCH_DIR / "warm_client.py"), str(self.run_dir), "--", sys.executable, "-u", *argv]
        return subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL)

    def log(self) -> str:
        return (self.run_dir / "logs" / "rank0.log").read_text()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Serves one local rank; the end of its control pipe ends it."""
    sockets = Path(tempfile.mkdtemp(prefix="h", dir="/tmp"))  # a short path: a socket's name has 107 bytes
    control_read, control = os.pipe()
    ready, ready_write = os.pipe()
    command = [
        sys.executable,
        "-u",
        "-c",
        BOOT,
        str(LAUNCH_DIR / "warm_server.py"),
        str(sockets / "0"),
        str(control_read),
        str(ready_write),
    ]
    process = subprocess.Popen(command, pass_fds=[control_read, ready_write], start_new_session=True)
    os.close(control_read)
    os.close(ready_write)
    os.write(control, b'{"preload": []}\n')
    assert b'"problem": ""' in os.read(ready, 65536)
    yield Server(process, sockets, tmp_path / "run")
    os.close(control)
    assert process.wait(10.0) in (0, -signal.SIGKILL)
    os.close(ready)
    assert process.returncode != 0 or not sockets.exists()  # the last one out removes the folder
    shutil.rmtree(sockets, ignore_errors=True)


def plain(folder: Path, mode: str) -> tuple[int, str]:
    """What `python -u exits.py MODE` does, both streams in one."""
    command = [sys.executable, "-u", "exits.py", mode]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def waiting(server: Server, folder: Path) -> tuple[subprocess.Popen[bytes], proctable.Process]:
    """A client, and its rank in its loop."""
    (folder / "wait.py").write_text(WAITING)
    client = server.client(folder, "wait.py")
    until(lambda: (folder / "pid").exists() and (folder / "pid").read_text() != "")
    rank = proctable.read(int((folder / "pid").read_text()))
    assert rank is not None
    return client, rank


def test_a_rank_ends_as_python_ends(server: Server, tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(EXITS)
    for mode in MODES:
        code = server.client(tmp_path, "exits.py", mode).wait(60.0)
        assert (code, server.log()) == plain(tmp_path, mode), mode
        (server.run_dir / "logs" / "rank0.log").unlink()


@pytest.mark.parametrize("name", ["missing.py", "broken.py", "folder"])
def test_a_script_that_python_cannot_run(server: Server, tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.py").write_text("x = = 1\n")
    (tmp_path / "folder").mkdir()
    code = server.client(tmp_path, name).wait(60.0)
    done = subprocess.run([sys.executable, "-u", name], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if name == "folder":  # never sent to a server (preload.obstacle); the words differ, the failure does not
        assert code != 0 and done.returncode != 0
    else:
        assert (code, server.log()) == (done.returncode, done.stdout)


def test_a_signal_reaches_the_rank_and_its_exit_comes_back(server: Server, tmp_path: Path) -> None:
    client, _ = waiting(server, tmp_path)
    client.send_signal(signal.SIGUSR1)
    assert client.wait(60.0) == 5 and server.log() == f"signal {signal.SIGUSR1:d}\n"


def test_a_signal_that_ends_the_rank_ends_the_client_alike(server: Server, tmp_path: Path) -> None:
    client, _ = waiting(server, tmp_path)
    client.terminate()
    assert client.wait(60.0) == -signal.SIGTERM


def test_a_killed_client_takes_its_rank_along_and_the_server_serves_on(server: Server, tmp_path: Path) -> None:
    client, rank = waiting(server, tmp_path)
    client.kill()
    client.wait()
    until(lambda: not proctable.same(rank))
    (tmp_path / "exits.py").write_text(EXITS)
    assert server.client(tmp_path, "exits.py", "number").wait(60.0) == 3


def test_a_killed_server_takes_its_rank_along_and_the_client_says_so(server: Server, tmp_path: Path) -> None:
    client, rank = waiting(server, tmp_path)
    server.process.kill()
    assert client.wait(60.0) == -signal.SIGKILL
    until(lambda: not proctable.same(rank))
