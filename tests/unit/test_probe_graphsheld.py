"""Tensors with a graph in the script's own containers: told where each step adds one, and for none of the healthy neighbours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe import cuts, sites
from harness.probe.sensors import graphsheld, keptlive
from harness.probe.state import S

torch = pytest.importorskip("torch")


class Memory:
    def __init__(self, kept: Any) -> None:
        self.kept = kept


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    recorder = SimpleNamespace(event=lambda kind, at, **fields: found.append(fields), disabled=False, errors=0)
    monkeypatch.setattr(S, "steps", 0)
    monkeypatch.setattr(S, "recorder", recorder)
    monkeypatch.setattr(graphsheld, "_first", {})
    monkeypatch.setattr(keptlive, "is_plain_object", lambda value: isinstance(value, Memory))
    monkeypatch.setattr(sites, "user_frame", lambda frame: frame)
    monkeypatch.setattr(cuts, "user_files", list)
    yield found


def steps(memory: Memory, add: Callable[[Any, int], None]) -> None:
    weight = torch.ones(3, requires_grad=True)
    for step in range(48):
        S.steps = step
        add((weight * step).sum(), step)
        graphsheld._at_step(None, None, None)


def test_each_step_adds_one(told: list[dict[str, Any]]) -> None:
    memory = Memory([])
    steps(memory, lambda value, step: memory.kept.append((step, value)))
    assert [(one["name"], one["num"], one["grown"], one["steps"]) for one in told] == [("memory.kept", 41, 24, 24)]
    told.clear()
    table = Memory({"curve": deque()})
    steps(table, lambda value, step: table.kept["curve"].append(value))
    assert [one["name"] for one in told] == ["memory.kept['curve']"]  # as the frame of the loop calls it


@pytest.mark.parametrize(
    "add",
    [
        lambda kept, value, step: kept.append(value.detach()),
        lambda kept, value, step: kept.append(float(value.item())),
        lambda kept, value, step: (kept.append(value), kept.clear() if step % 5 == 0 else None),
        lambda kept, value, step: kept.append(value) if step % 4 == 0 else None,
    ],
    ids=["detached", "a number", "emptied", "now and then"],
)
def test_healthy_containers(told: list[dict[str, Any]], add: Callable[[Any, Any, int], None]) -> None:
    memory = Memory([])
    steps(memory, lambda value, step: add(memory.kept, value, step))
    assert told == []


def test_a_short_window(told: list[dict[str, Any]]) -> None:
    memory = Memory(deque(maxlen=20))
    steps(memory, lambda value, step: memory.kept.append(value))
    assert told == []
