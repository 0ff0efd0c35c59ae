"""Threads that stand still at one line, counted by the beat."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.probe import sites
from harness.probe.sensors import threads
from harness.probe.state import S


class Recorder:
    disabled, errors = False, 0

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def event(self, kind: str, site: sites.Site, **fields: Any) -> None:
        self.told.append((site[2], fields))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    for name in ("_started", "_seen", "_told"):
        monkeypatch.setattr(threads, name, {})
    monkeypatch.setattr(sites, "_is_user", {})
    monkeypatch.setattr(sites, "is_user_file", lambda file: file == __file__)
    told = Recorder()
    monkeypatch.setattr(S, "recorder", told)
    monkeypatch.setattr(S, "steps", 0)
    yield told


def started(target: Callable[[], object], step: int, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    monkeypatch.setattr(S, "steps", step)
    threads._started[thread.ident or 0] = (("train.py", 56, "__iter__"), step)
    return thread


def looked(times: int = threads.STILL) -> None:
    time.sleep(0.05)
    for _ in range(times):
        threads.look()


def test_threads_that_wait_for_a_queue_that_nobody_reads(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    box: queue.Queue[int] = queue.Queue(1)
    box.put(0)

    def fill() -> None:
        box.put(1)

    waiting = [started(fill, 12 * n, monkeypatch) for n in range(4)]
    looked(threads.STILL - 1)
    assert recorder.told == []
    looked(2)
    ((function, fields),) = recorder.told  # once
    assert (function, fields["num"], fields["steps"], fields["first"], fields["last"]) == ("fill", 4, 4, 0, 36)
    for _ in waiting:
        box.get()
    for thread in waiting:
        thread.join()
    looked(1)
    assert threads._started == {} and threads._seen == {}


def test_threads_that_move_or_wait_for_nobody(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()
    box: queue.Queue[int] = queue.Queue(1)

    def sleeps() -> None:
        while not closed.is_set():
            time.sleep(0.2)

    def offers() -> None:
        while not closed.is_set():
            try:
                box.put(1, timeout=0.001)
            except queue.Full:
                sum(range(1000))

    own = [started(sleeps, n, monkeypatch) for n in range(4)] + [started(offers, n, monkeypatch) for n in range(3)]
    looked(6)
    assert recorder.told == []
    closed.set()
    for thread in own:
        thread.join()


def test_waits_that_end_by_themselves(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()
    box: queue.Queue[int] = queue.Queue()

    def removes() -> None:
        closed.wait(10)

    def takes() -> None:
        assert box.get(timeout=10) == 1

    def waits() -> None:
        closed.wait(timeout=None)

    own = [started(target, n, monkeypatch) for n in range(4) for target in (removes, takes)]
    looked(4)
    assert recorder.told == []
    own += [started(waits, n, monkeypatch) for n in range(4)]
    looked()
    assert [function for function, _ in recorder.told] == ["waits"]
    closed.set()
    for _ in range(4):
        box.put(1)
    for thread in own:
        thread.join()


def test_a_start_is_noted_with_the_line_of_the_script(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Thread:
        ident = 7

        def start(self) -> None:
            pass

    module = type("module", (), {"Thread": Thread})
    threads._on_threading(module)
    Thread().start()
    assert [(site[2], step) for site, step in threads._started.values()] == [("test_a_start_is_noted_with_the_line_of_the_script", 0)]
