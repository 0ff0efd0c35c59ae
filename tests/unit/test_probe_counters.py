"""Additions to a shared number without a lock, as the source shows them: told for the mistake, and for none of its healthy neighbours."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from harness.probe.sensors import counters


def at(tmp_path: Path, source: str) -> tuple[str, int]:
    path = tmp_path / "work.py"
    path.write_text(source)
    return str(path), next(n for n, text in enumerate(source.splitlines(), 1) if "# here" in text)


@pytest.mark.parametrize("statement", ["c.value += 1", "c.value = c.value + 2", "self.c.value -= 1"])
def test_reads_and_writes(tmp_path: Path, statement: str) -> None:
    file, line = at(tmp_path, f"def work(c):\n    for i in x:\n        {statement}  # here\n")
    assert counters.reads_and_writes(file, line) and not counters.may_hold_a_lock(file, line)


@pytest.mark.parametrize("statement", ["c.value = 0", "done.value = 1", "c.value = n.value + 1", "n += c.value"])
def test_writes_only(tmp_path: Path, statement: str) -> None:
    assert not counters.reads_and_writes(*at(tmp_path, f"def work(c):\n    {statement}  # here\n"))


@pytest.mark.parametrize(
    "source",
    [
        "def work(c, lock):\n    with lock:\n        c.value += 1  # here\n",
        "def work(c):\n    with c.get_lock():\n        if c.value > 3:\n            return\n        c.value += 1  # here\n",
        "def work(c, lock):\n    lock.acquire()\n    c.value += 1  # here\n    lock.release()\n",
        "def work(c, b):\n    while True:\n        b.wait()\n        if step % n == rank:\n            c.value += 1  # here\n        b.wait()\n",
        "def work(c, turn):\n    for i in x:\n        while turn.value != me:\n            time.sleep(0.01)\n        c.value += 1  # here\n        turn.value = 1\n",
        "def work(c, guard):\n    with guard() as g, torch.no_grad():\n        c.value += 1  # here\n",
    ],
)
def test_a_lock_may_be_held(tmp_path: Path, source: str) -> None:
    assert counters.may_hold_a_lock(*at(tmp_path, source))


@pytest.mark.parametrize("around", ["torch.no_grad()", "torch.autocast('cpu')", "open('x') as f"])
def test_a_with_that_is_no_lock(tmp_path: Path, around: str) -> None:
    assert not counters.may_hold_a_lock(*at(tmp_path, f"def work(c):\n    with {around}:\n        c.value += 1  # here\n"))


def test_without_source_a_lock_may_be_held() -> None:
    assert counters.may_hold_a_lock("/none.py", 3) and not counters.reads_and_writes("/none.py", 3)


@pytest.mark.parametrize(
    "source",
    [
        "def work(c, started):\n    started.wait()\n    for i in x:\n        c.value += 1  # here\n",
        "def work(c, started):\n    started.wait()\n    for i in x:\n        if i % 8 == 0:\n            c.value += 8  # here\n",
        "def work(c, barrier):\n    for i in x:\n        barrier.wait()\n        c.value += 1  # here\n",  # all of them, between two barriers
        "def work(c, barrier):\n    if x:\n        for i in x:\n            barrier.wait()\n            c.value += 1  # here\n",
        "def work(c, n):\n    while c.value < n:\n        step()\n        c.value += 1  # here\n",
    ],
)
def test_waiting_for_the_others_is_no_turn(tmp_path: Path, source: str) -> None:
    assert not counters.may_hold_a_lock(*at(tmp_path, source))


def test_two_values_of_one_lock_are_two() -> None:
    context = multiprocessing.get_context("spawn")
    lock = context.RLock()
    first, second = context.Value("i", 0, lock=lock), context.Value("i", 0, lock=lock)
    assert counters._place(first) != counters._place(second)
