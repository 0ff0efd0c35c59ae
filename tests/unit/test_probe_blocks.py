"""Blocks of shared memory that have their name still: counted where nobody unlinks them, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing import managers
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest

from harness.probe.sensors import blocks
from harness.probe.state import S


class Told:
    """Stands for the recorder."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, kind: str, site: Any, /, **fields: Any) -> None:
        self.events.append({"kind": kind} | fields)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    recorder = Told()
    monkeypatch.setattr(S, "recorder", recorder)
    monkeypatch.setattr(blocks, "_made", {})
    monkeypatch.setattr(blocks, "_told", {os.getpid()})
    yield recorder


def through(memory: SharedMemory, name: str | None) -> None:
    """As many frames as lie between the sensor and who makes a block."""

    def look() -> None:
        def guarded() -> None:
            blocks.note(memory, name)

        guarded()

    look()


def make(num: int, *, unlink: bool = False, close: bool = True, name: str | None = None) -> None:
    kept = []
    for at in range(num):
        memory = SharedMemory(create=True, size=8)
        through(memory, name and f"{name}{at}")
        if close:
            memory.close()
        if unlink:
            memory.unlink()
        kept.append(memory)
    for memory in kept:
        memory.close()
        if not unlink:
            memory.unlink()


def test_blocks_that_are_closed_only(told: Told) -> None:
    make(40)
    (found,) = told.events
    assert found["num"] == 32 and len(found["inodes"]) == 31  # the newest one is still open


def test_blocks_that_are_unlinked_or_open(told: Told) -> None:
    make(40, unlink=True)
    make(40, close=False)
    assert [e["inodes"] for e in told.events] == [[], []]


def test_blocks_with_names_and_few_of_them(told: Told) -> None:
    make(40, name="cache")
    make(16)
    assert told.events == []


def test_a_manager_unlinks_what_it_makes(told: Told) -> None:
    source = "def work(make):\n    make()\n"
    place: dict[str, Any] = {}
    exec(compile(source, managers.__file__, "exec"), place)
    memory = SharedMemory(create=True, size=8)

    def look() -> None:
        blocks.note(memory, None)

    for _ in range(40):
        place["work"](lambda: (lambda: look())())
    memory.close()
    memory.unlink()
    assert told.events == []


def test_the_first_block_of_a_process_is_told(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    make(1, name="own")  # a block with a name of the script's is not judged
    assert told.events == []
    monkeypatch.setattr(blocks, "_told", set())
    make(3, unlink=True)
    assert told.events == [{"kind": "block_made"}]
