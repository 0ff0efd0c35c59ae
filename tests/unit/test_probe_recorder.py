"""The recorder's status page, which steps carry digests, and how graphs that are alive are counted after the first steps."""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe import protocol, sites
from harness.probe.recorder import MAX_DETAILS, PAGE_EVERY_NS, Recorder
from harness.probe.sensors import graphs
from harness.probe.state import S
from harness.record import Recording

SITE = ("/x/train.py", 7, "main")


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(str(tmp_path), "main")
    made.phase("train")
    yield made
    made.forget()


def page(recorder: Recorder) -> protocol.Status:
    path = Path(recorder.run_dir) / protocol.REC_DIR / f"{recorder.stem}.status"
    found = protocol.parse_status(path.read_bytes())
    assert found is not None
    return found


def test_the_page_has_room_on_the_disk_before_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole that finds none would be a bus error in the user's process."""
    blocks: list[int] = []

    def mapped(fd: int, num_bytes: int) -> bytearray:
        blocks.append(os.fstat(fd).st_blocks)
        return bytearray(num_bytes)

    monkeypatch.setattr("harness.probe.recorder.mmap.mmap", mapped)
    made = Recorder(str(tmp_path), "main")
    made.phase("train")
    made.forget()
    assert blocks and blocks[0] > 0


def test_a_call_is_on_the_page_at_once_when_the_last_write_is_old(recorder: Recorder) -> None:
    recorder._page_ns = time.time_ns() - PAGE_EVERY_NS - 1
    recorder.enter("all_reduce", SITE)
    seen = page(recorder)
    assert (seen.op, seen.site, seen.phase) == ("all_reduce", "/x/train.py:7:main", "train")
    assert seen.since_ns == recorder._op_since


def test_without_a_beat_a_call_is_on_the_page_at_once(recorder: Recorder) -> None:
    recorder._page_ns = time.time_ns() + 10**12
    recorder.enter("join", SITE)
    assert page(recorder).op == "join"
    recorder.leave()
    assert page(recorder).op == ""


def test_a_call_soon_after_a_write_is_published_by_the_beat(recorder: Recorder) -> None:
    recorder.beats = True
    recorder._page_ns = time.time_ns() + 10**12  # as if it were written just now, however slow this machine is
    recorder.enter("backward", None)
    recorder.progress()
    assert page(recorder).op == ""
    recorder.publish(SITE)
    seen = page(recorder)
    assert (seen.op, seen.site, seen.progress) == ("backward", "/x/train.py:7:main", 1)


def test_leaving_clears_a_longer_site(recorder: Recorder) -> None:
    recorder.enter("barrier", ("/a/very/long/path/to/train.py", 1, "main"))
    recorder.publish()
    recorder.leave()
    recorder.publish()
    seen = page(recorder)
    assert (seen.op, seen.site, seen.progress) == ("", "", 1)


def test_the_same_steps_carry_digests_on_every_rank_and_all_of_them_are_kept() -> None:
    steps = [s for s in range(300_000) if protocol.witnessed(s)]
    assert steps[:258] == [*range(256), 256, 272]
    assert [s for s in steps if 1008 <= s < 1200] == [1008, 1024, 1088, 1152]
    assert all(protocol.kept(s) for s in steps)
    assert len(steps) < 5000


def test_a_call_site_is_the_line_that_runs() -> None:
    def at() -> sites.Site:
        return sites.of_frame(sys._getframe(1))

    first = at(); second = at()  # fmt: skip  # noqa: E702
    third = at()
    assert first[1] == second[1] == third[1] - 1
    assert first[2] == "test_a_call_site_is_the_line_that_runs"


class Graph:
    """What `watch` reads of a tensor whose graph has one node."""

    def __init__(self) -> None:
        self.grad_fn: Any = SimpleNamespace(metadata={}, next_functions=())

    def numel(self) -> int:
        return 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    monkeypatch.setattr(graphs, "_first", lambda output: output)
    monkeypatch.setattr(graphs, "_young_step", [-1])
    for table in ("_alive", "_young", "_in_work"):
        monkeypatch.setattr(graphs, table, dict.fromkeys(graphs._alive, 0))
    monkeypatch.setattr(graphs, "_told", {"train": 10**9, "eval": 10**9})
    yield []
    S.reset()


def alive_after(num_steps: int, keep_every: int, counted: list[int]) -> list[int]:
    held: list[Graph] = []
    loss = None
    for step in range(num_steps):
        S.steps = step
        loss = Graph()
        graphs.watch(loss, "train")
        if keep_every and step % keep_every == 0:
            held.append(loss)
        counted.append(S.graphs_alive)
    held.clear()
    del loss
    assert S.graphs_alive <= 1
    return counted


def test_one_graph_is_alive_in_a_healthy_loop(counted: list[int]) -> None:
    assert max(alive_after(1000, 0, counted)) <= 2


@pytest.mark.parametrize("keep_every", [1, 2, 10])
def test_kept_graphs_rise_as_they_are_kept(counted: list[int], keep_every: int) -> None:
    alive = alive_after(2048, keep_every, counted)
    assert 0.7 * 2048 / keep_every <= alive[-1] <= 1.3 * 2048 / keep_every
    assert all(b >= a for a, b in pairwise(alive))


def test_digests_of_parameters_are_written_by_the_beat_or_where_they_are_many(recorder: Recorder) -> None:
    path = Path(recorder.run_dir) / protocol.REC_DIR / f"{recorder.stem}.params"
    one = protocol.DETAIL.size + 4 * 4
    recorder.detail(0, 0, [1, 2], [3, 4])
    assert not path.exists()
    recorder.flush()
    assert path.read_bytes() == protocol.PARAMS_MAGIC + protocol.DETAIL.pack(0, 0, 2) + struct.pack("<4I", 1, 2, 3, 4)
    for step in range(1, MAX_DETAILS + 1):
        recorder.detail(step, 0, [1, 2], [3, 4])
    assert path.stat().st_size == len(protocol.PARAMS_MAGIC) + (1 + MAX_DETAILS) * one
    recorder.detail(MAX_DETAILS + 1, 0, [1, 2], [3, 4])
    recorder.forget()  # a fork's copy: its parent writes them
    recorder.flush()
    assert path.stat().st_size == len(protocol.PARAMS_MAGIC) + (1 + MAX_DETAILS) * one


def _read_back(recorder: Recorder) -> list[tuple[int, int]]:
    blob = (Path(recorder.run_dir) / protocol.REC_DIR / f"{recorder.stem}.params").read_bytes()
    assert blob.startswith(protocol.PARAMS_MAGIC) and blob.count(protocol.PARAMS_MAGIC) == 1
    return list(Recording(recorder.stem, params=blob[len(protocol.PARAMS_MAGIC) :]).details)


def test_the_beat_and_the_end_write_one_after_the_other(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find the file not open yet, and the end closes the recording: nothing is written twice or lost."""
    opened, as_it_was = threading.Event(), os.open

    def slow(path: str, *args: Any) -> int:
        if path.endswith(".params"):
            opened.set()
            time.sleep(0.1)
        return as_it_was(path, *args)

    recorder.detail(0, 0, [1], [2])
    monkeypatch.setattr(os, "open", slow)
    beat = threading.Thread(target=recorder.flush)
    beat.start()
    opened.wait()
    recorder.detail(1, 0, [3], [4])
    recorder.flush()
    recorder.closed = True
    beat.join()
    assert _read_back(recorder) == [(0, 0), (1, 0)]


def test_a_write_of_the_beats_that_hangs_does_not_hold_up_the_end(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.probe.recorder.FLUSH_S", 0.05)
    go_on, hangs = threading.Event(), threading.Event()

    def write(fd: int, blob: bytes) -> int:
        hangs.set()
        go_on.wait()
        return len(blob)

    monkeypatch.setattr("harness.probe.recorder.os.write", write)
    recorder.detail(0, 0, [1], [2])
    beat = threading.Thread(target=recorder.flush)
    beat.start()
    hangs.wait()
    began = time.monotonic()
    recorder.flush()
    assert time.monotonic() - began < 5
    go_on.set()
    beat.join()


def test_nothing_is_written_behind_a_torn_record(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.detail(0, 0, [1, 2], [3, 4])
    recorder.flush()
    write = os.write
    monkeypatch.setattr("harness.probe.recorder.os.write", lambda fd, blob: write(fd, blob[:10]))  # the disk is full
    recorder.detail(1, 0, [1, 2], [3, 4])
    recorder.flush()
    monkeypatch.setattr("harness.probe.recorder.os.write", write)  # and has room again
    recorder.detail(2, 0, [1, 2], [3, 4])
    recorder.flush()
    assert _read_back(recorder) == [(0, 0)] and recorder.errors == 1
