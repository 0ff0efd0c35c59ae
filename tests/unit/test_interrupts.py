"""What a signal handler of the script raises while the probe works is the script's: it is neither swallowed nor does it cost a recorded failure."""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from harness.probe import failures, patching
from harness.probe.state import S


class WorkerGone(RuntimeError):
    pass


@pytest.fixture
def raises_on_usr1() -> Iterator[None]:
    def handler(_number: int, _frame: FrameType | None) -> None:
        raise WorkerGone("killed by signal")

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a recorder that stands in for the real one is given."""
    events: list[dict[str, Any]] = []

    def event(kind: str, _site: object = None, **fields: Any) -> None:
        events.append({"kind": kind, **fields})

    monkeypatch.setattr(S, "recorder", SimpleNamespace(disabled=False, errors=0, event=event, _phase=b"step", _op=b"", fallen=0))
    return events


@pytest.mark.usefixtures("raises_on_usr1")
def test_an_exception_of_a_signal_handler_reaches_the_script() -> None:
    look = patching.quiet(lambda: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(WorkerGone):
        look()
    assert not S.at_work.yes


class Handler:
    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        raise WorkerGone("an object")


def gone(_note: str, _number: int, _frame: FrameType | None) -> None:
    raise WorkerGone("a partial")


def once(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise WorkerGone("takes itself away")


@pytest.mark.parametrize("handler", [Handler(), functools.partial(gone, "x"), once])
def test_handlers_of_other_kinds(handler: Any) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(WorkerGone):
            patching.quiet(lambda: signal.raise_signal(signal.SIGUSR1))()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_exception_of_the_probe_does_not() -> None:
    def look() -> None:
        raise WorkerGone("the probe's own")

    assert patching.quiet(look)() is None
    assert S.recorder.errors == 1


@pytest.mark.usefixtures("raises_on_usr1")
def test_a_failure_is_written_although_a_signal_handler_raises_meanwhile(
    monkeypatch: pytest.MonkeyPatch, written: list[dict[str, Any]]
) -> None:
    struck = iter([True])

    def left_behind(*_args: Any) -> None:
        if next(struck, False):
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(failures.attributes, "left_behind", left_behind)
    failures.record(RuntimeError("a pipe broke"))
    assert [(e["kind"], e["message"]) for e in written] == [("failure", "a pipe broke")]
