"""A wait for what was started without waiting is on the status page while it lasts, at its own line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.probe.recorder import Recorder
from harness.probe.sensors import waiting
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
    def gone() -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError):
        waiting._make(gone)()
    assert not recorder.inside


def test_a_wait_within_a_call_or_on_another_thread_does_not_hide_the_call(recorder: Recorder) -> None:
    seen: list[bytes] = []
    wait = waiting._make(lambda: seen.append(recorder._op))
    recorder.enter("all_reduce", None)
    wait()
    recorder.leave()
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert seen == [b"all_reduce", b""]
