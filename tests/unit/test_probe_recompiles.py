"""Why dynamo compiled again: numbers of the script are told, shapes and flags are not."""

from __future__ import annotations

from typing import Any

import pytest

from harness.probe.sensors import recompiles
from harness.probe.state import S


class Told:
    """Stands for the recorder."""

    disabled, errors = False, 0

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, kind: str, site: Any, /, **fields: Any) -> None:
        self.events.append({"site": site} | fields)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    recorder = Told()
    monkeypatch.setattr(S, "recorder", recorder)
    monkeypatch.setattr(S, "steps", 0)
    monkeypatch.setattr(recompiles, "_frames", {})
    return recorder.events


def reason(text: str) -> str:
    return f'0/1: {text}    # self.seen += 1  # /u/train.py:7 in forward\nUser stack trace:\n  File "/u/train.py", line 7, in forward\n    self.seen += 1'


def compile_all(reasons: list[str], a_step: int = 1) -> None:
    for at, one in enumerate(reasons):
        S.steps = at // a_step
        recompiles.note(reason(one), "/u/train.py", 6, "forward", 0.5)


def test_a_number_that_changes_in_every_step(told: list[dict[str, Any]]) -> None:
    compile_all([f"self.seen == {n}" for n in range(13)])
    assert [(e["num"], e["first"], e["last"], e["seconds"]) for e in told] == [(6, 0, 5, 3.0), (12, 0, 11, 6.0)]
    assert told[0]["site"] == ("/u/train.py", 7, "forward") and told[0]["expression"] == "self.seen"


def test_the_last_of_them_is_told_at_the_end(told: list[dict[str, Any]]) -> None:
    compile_all([f"self.width == {n}" for n in range(8)])
    recompiles._tell_at_the_end()
    assert [(e["num"], e["last"]) for e in told] == [(6, 5), (8, 7)] and told[-1]["limit"] >= 8


@pytest.mark.parametrize(
    "reasons",
    [
        [f"tensor 'x' size mismatch at index 0. expected 16, actual {n}" for n in range(12)],
        [f"x.size()[0] == {n}" for n in range(12)],
        [f"len(self.parts) == {n}" for n in range(12)],
        ["not self.training"] * 12,
        ["self.mode == 'warm'"] * 12,
        [f"self.stage == {n % 3}" for n in range(12)],
        [f"self.layers[{n}].index == {n}" for n in range(12)],
    ],
)
def test_other_reasons(told: list[dict[str, Any]], reasons: list[str]) -> None:
    compile_all(reasons)
    assert told == []


def test_many_compilations_in_one_step(told: list[dict[str, Any]]) -> None:
    compile_all([f"self.index == {n}" for n in range(12)], a_step=12)  # one block's code for twelve blocks, at the first step
    assert told == []


def test_reasons_without_a_stack() -> None:
    assert recompiles.place("0/1: self.seen == 3", "/u/train.py", 6, "forward") == ("/u/train.py", 6, "forward")
    assert recompiles.read("L['self'].seen == 3   # line") == ("L['self'].seen", "3") and recompiles.read("") is None
