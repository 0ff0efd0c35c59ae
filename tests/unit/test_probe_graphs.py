"""Graphs alive are counted by tokens; from the LATERth step on one stands for several, but for the loss's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.probe.sensors import graphs
from harness.probe.state import S


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(graphs, "_alive", dict.fromkeys(graphs._alive, 0))
    monkeypatch.setattr(graphs, "_told", {"train": 10**6, "eval": 10**6})
    monkeypatch.setattr(S, "steps", 0)
    monkeypatch.setattr(S, "graphs_alive", 0)


def _trained(kept: list[Any], keep_hidden: bool, number: int) -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for step in range(S.steps, S.steps + number):
        S.steps = step
        hidden = first(torch.ones(2, 2))
        loss = second(hidden).sum()
        graphs.watch(loss, "train")
        kept.append(hidden if keep_hidden else loss)
        loss.backward(retain_graph=True)


@pytest.mark.parametrize("keep_hidden", [True, False])
@pytest.mark.parametrize("first", [0, graphs.LATER])
@pytest.mark.usefixtures("steps")
def test_each_graph_that_is_kept_counts(keep_hidden: bool, first: int) -> None:
    S.steps = first
    kept: list[Any] = []
    _trained(kept, keep_hidden, 32)
    assert 31 <= S.graphs_alive <= 33
    kept.clear()
    assert S.graphs_alive == 0


def test_tokens_stand_for_all_steps_and_fall_on_every_remainder() -> None:
    weights = [graphs._weight(step) for step in range(graphs.ALL_STEPS)]
    assert sum(weights) == graphs.ALL_STEPS
    assert {step % graphs.LATER_EVERY for step in range(graphs.LATER, graphs.ALL_STEPS) if weights[step]} == set(range(graphs.LATER_EVERY))
