"""Graphs alive are counted by tokens; from the LATERth step on one stands for several, but for the loss's own.

What only the step in work has must look alike at all steps: a number that jumps up at those that are counted, and falls behind them, is a climb to MEM101.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from harness.probe.sensors import graphs
from harness.probe.state import S


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    for table in ("_alive", "_young", "_in_work"):
        monkeypatch.setattr(graphs, table, dict.fromkeys(graphs._alive, 0))
    monkeypatch.setattr(graphs, "_young_step", [-1])
    monkeypatch.setattr(graphs, "_told", {"train": 10**6, "eval": 10**6})
    monkeypatch.setattr(S, "steps", 0)
    monkeypatch.setattr(S, "graphs_alive", 0)


def _trained(kept: Any, keep_hidden: bool, number: int, each: int = 1) -> list[int]:
    """Graphs alive at each row; `each`: losses a step."""
    first, second, rows = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), []
    for i in range(number * each):
        hidden = first(torch.ones(2, 2))
        loss = second(hidden).sum()
        graphs.watch(loss, "train")
        kept.append(hidden if keep_hidden else loss)
        loss.backward(retain_graph=True)
        if i % each == each - 1:
            graphs.note_row(S.steps)
            rows.append(S.graphs_alive)
            S.steps += 1
    return rows


@pytest.mark.parametrize("keep_hidden", [True, False])
@pytest.mark.parametrize("first", [0, graphs.LATER])
@pytest.mark.usefixtures("steps")
def test_each_graph_that_is_kept_counts(keep_hidden: bool, first: int) -> None:
    S.steps = first
    kept: list[Any] = []
    rows = _trained(kept, keep_hidden, 40)
    assert 36 <= S.graphs_alive <= 40 and rows == sorted(rows)
    kept.clear()
    assert S.graphs_alive <= 1


@pytest.mark.parametrize("keep_hidden", [True, False])
@pytest.mark.parametrize("each", [2, 12, 16])
@pytest.mark.usefixtures("steps")
def test_what_one_step_keeps_until_the_next_is_no_climb(keep_hidden: bool, each: int) -> None:
    rows = _trained(deque(maxlen=each), keep_hidden, 100, each)
    assert set(rows[1:]) == {each}


@pytest.mark.parametrize("keep_hidden", [True, False])
@pytest.mark.parametrize("length", [9, 12, 14, 20])
@pytest.mark.usefixtures("steps")
def test_a_window_that_fills_up_late_goes_up_from_where_it_was(keep_hidden: bool, length: int) -> None:
    before = _trained(deque(maxlen=1), keep_hidden, 40)
    assert set(before) == {1}
    rows = _trained(deque(maxlen=length), keep_hidden, 60)
    assert max(rows) <= length + graphs.LATER_EVERY + 1


class Raising(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


class Giving(dict):  # type: ignore[type-arg]
    __getattr__ = dict.get


@pytest.mark.parametrize("kind", [dict, Raising, Giving])
@pytest.mark.usefixtures("steps")
def test_the_first_tensor_of_an_output_is_found_without_a_call_of_its_class(kind: type) -> None:
    output = torch.ones(2, requires_grad=True) * 2
    assert graphs._first(kind(logits=output)) is output


def test_tokens_stand_for_all_steps_and_fall_on_every_remainder() -> None:
    weights = [graphs._weight(step) for step in range(graphs.ALL_STEPS)]
    assert sum(weights) == graphs.ALL_STEPS
    assert {step % graphs.LATER_EVERY for step in range(graphs.LATER, graphs.ALL_STEPS) if weights[step]} == set(range(graphs.LATER_EVERY))
