"""A wait for what was started without waiting is on the status page while it lasts, at its own line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import Work

from harness.probe.recorder import Recorder
from harness.probe.sensors import handles, waiting
from harness.probe.state import S


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(str(tmp_path), "main")
    monkeypatch.setattr(S, "recorder", made)
    yield made
    made.forget()


def test_a_wait_is_a_call_that_blocks(recorder: Recorder) -> None:
    seen: list[bytes] = []

    def blocks(answer: int) -> int:
        seen.append(recorder._op)
        return answer

    assert waiting._make(blocks)(7) == 7 and seen == [b"wait"] and not recorder.inside


def test_a_wait_that_raises_is_over(recorder: Recorder) -> None:
    def gone(work: object) -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError):
        waiting._make(gone)(object())
    assert not recorder.inside


def test_a_wait_within_a_call_or_on_another_thread_does_not_hide_the_call(recorder: Recorder) -> None:
    seen: list[bytes] = []
    wait = waiting._make(lambda work: seen.append(recorder._op))
    recorder.enter("all_reduce", None)
    wait(object())
    recorder.leave()
    thread = threading.Thread(target=wait, args=(object(),))
    thread.start()
    thread.join()
    assert seen == [b"all_reduce", b""]


class Mine(Work):  # type: ignore[misc, unused-ignore]
    """A work of the script's own, that waits as torch's do."""


class Wrapping(Work):  # type: ignore[misc, unused-ignore]
    def wait(self, timeout: timedelta = timedelta(seconds=5)) -> bool:
        return bool(super().wait(timeout))


@pytest.mark.parametrize("kind", [Mine, Wrapping])
def test_a_work_of_the_scripts_own_waits_as_without_us(kind: type, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """pybind takes a function in the place of `Work.wait` for an override, and calls it again, unless its frame looks like the method's."""
    monkeypatch.setattr(Work, "wait", handles._asking(waiting._make(Work.wait), "wait"))
    with pytest.raises(RuntimeError, match="imed out"):
        kind().wait(timedelta(milliseconds=20))
