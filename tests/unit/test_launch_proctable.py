"""Looking at processes and ending them without touching a stranger."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.launch import proctable, shm
from harness.launch.proctable import Process
from harness.probe.protocol import ENV_RUN_ID


def process(pid: int, ppid: int, state: str = "S") -> Process:
    return Process(pid, ppid, 1, 1, state, "x")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that bears a run id and waits."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, env={ENV_RUN_ID: "mine"}) as running:
        yield running
        running.kill()


def test_descendants_are_found_through_dead_parents_and_nearest_first() -> None:
    table = {each.pid: each for each in (process(2, 1), process(3, 2, "Z"), process(4, 3), process(5, 1), process(6, 9))}
    assert [each.pid for each in proctable.descendants(table, 1)] == [2, 5, 4]


def test_a_process_is_marked_by_its_run_id_only(child: subprocess.Popen[bytes]) -> None:
    while not (table := proctable.snapshot())[child.pid].name.startswith("python"):
        pass  # between fork and exec it still is this process
    assert [each.pid for each in proctable.marked(table, "mine")] == [child.pid]
    assert proctable.marked(table, "min") == []


def test_a_reused_pid_is_not_signalled(child: subprocess.Popen[bytes]) -> None:
    now = proctable.read(child.pid)
    assert now is not None
    assert not proctable.send(replace(now, ticks=now.ticks - 1), signal.SIGKILL)
    assert child.poll() is None
    assert proctable.send(now, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not proctable.send(now, signal.SIGKILL)


def test_listening_ports_are_found_by_owner() -> None:
    with socket.socket() as listener, socket.socket() as bound:
        listener.bind(("127.0.0.1", 0))
        bound.bind(("127.0.0.1", 0))
        listener.listen()
        assert listener.getsockname()[1] in proctable.listening_ports([os.getpid()])[os.getpid()]
        assert bound.getsockname()[1] not in proctable.listening_ports([os.getpid()])[os.getpid()]


def test_a_segment_is_ours_by_name_or_by_mapping_and_removed_by_inode() -> None:
    from multiprocessing.shared_memory import SharedMemory

    memory = SharedMemory(create=True, size=64)
    try:
        assert (
            memory.name in shm.segments() and memory.name in shm.mapped_by(os.getpid()) and memory.name in shm.in_use({memory.name, "no"})
        )
        inode = shm.segments()[memory.name]
        assert not shm.remove(memory.name, inode + 1) and memory.name in shm.segments()
        assert shm.remove(memory.name, inode) and memory.name not in shm.segments()
    finally:
        memory.close()
        from multiprocessing import resource_tracker

        resource_tracker.unregister(f"/{memory.name}", "shared_memory")
    assert shm.made_by("torch_123_456_0", [123]) and not shm.made_by("torch_123_456_0", [12]) and not shm.made_by("psm_123", [123])


def test_what_a_rank_noted_is_its_own_by_the_very_inode(tmp_path: Path) -> None:
    (tmp_path / "rec").mkdir()
    (tmp_path / "rec" / "0-5-9.shm").write_bytes(b"41 psm_a\nx psm_b\n42 sem.of mine\n\n43\n")
    (tmp_path / "rec" / "0-6-9.shm").symlink_to(tmp_path / "rec" / "0-5-9.shm")
    assert shm.noted(tmp_path) == {("psm_a", 41), ("sem.of mine", 42)}
    assert shm.noted(tmp_path / "nowhere") == set()
