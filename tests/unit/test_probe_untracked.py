"""Averaged weights with blank statistics: told for the mistake, and for none of its healthy neighbours."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe.sensors import layers, untracked

torch = pytest.importorskip("torch")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(untracked, "_calls", weakref.WeakKeyDictionary())
    monkeypatch.setattr(untracked, "_weights", weakref.WeakKeyDictionary())
    monkeypatch.setattr(untracked, "_told", weakref.WeakSet())
    monkeypatch.setattr(untracked, "S", SimpleNamespace(steps=9, recorder=SimpleNamespace(event=lambda kind, site, **fields: found.append(fields))))
    monkeypatch.setattr(layers, "roots", list)
    yield found


def net() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def trained(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).sum().backward()
        optimizer.step()
    return model


def averaged(source: Any, *, buffers: bool) -> Any:
    average = net().requires_grad_(False).eval()
    for mine, theirs in zip(average.parameters(), source.parameters(), strict=True):
        mine.data.lerp_(theirs.data, 0.5)
    if buffers:
        for mine, theirs in zip(average.buffers(), source.buffers(), strict=True):
            mine.data.copy_(theirs)
    return average


def test_an_average_of_the_parameters_alone_is_told_once(told: list[dict[str, Any]]) -> None:
    source = trained(net())
    average = averaged(source, buffers=False)
    for _ in range(4):
        untracked._at_eval_forward(average)
        average[1].weight.data.lerp_(source[1].weight.data, 0.5)
    assert told == [{"module": "Sequential", "num": 1}]


def test_a_copy_of_the_parameters_alone_is_told_at_once(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    source = trained(net())
    monkeypatch.setattr(layers, "roots", lambda: [source])
    average = net().requires_grad_(False).eval()
    average[1].weight.data.copy_(source[1].weight.data)
    untracked._at_eval_forward(average)
    assert len(told) == 1


def test_an_average_that_is_evaluated_once_is_told(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    average = averaged(trained(net()), buffers=False)
    monkeypatch.setattr(untracked.averaged, "has_moved", lambda model: model is average)
    untracked._at_eval_forward(average)
    assert len(told) == 1


def drawn() -> Any:
    """As for a DCGAN."""
    model = net().requires_grad_(False).eval()
    torch.nn.init.normal_(model[1].weight, 1.0, 0.02)
    return model


def folded() -> Any:
    """Out of a file: its statistics are folded into weight and bias."""
    model = net()
    model.load_state_dict(drawn().state_dict())
    return model.eval()


@pytest.mark.parametrize("healthy", [drawn, folded])
def test_weights_that_training_never_moves_are_not(told: list[dict[str, Any]], healthy: Any) -> None:
    model = healthy()
    for _ in range(4):
        untracked._at_eval_forward(model)
    assert told == []


def test_an_average_before_the_first_step_is_not(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    source = drawn()
    monkeypatch.setattr(layers, "roots", lambda: [source])
    monkeypatch.setattr(untracked.S, "steps", 0)
    untracked._at_eval_forward(copy.deepcopy(source))
    assert told == []


@pytest.mark.parametrize(
    "healthy",
    [
        lambda: averaged(trained(net()), buffers=True),
        lambda: net().eval(),  # evaluated before training
        lambda: copy.deepcopy(trained(net())).eval(),
        lambda: trained(net().eval()),  # trained in eval mode on purpose: its gradients are there
        lambda: averaged(net(), buffers=False),  # an average before the first step
        lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(4, affine=False)).eval(),
        lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(4, track_running_stats=False)).eval(),
    ],
)
def test_healthy_models_are_not(told: list[dict[str, Any]], healthy: Any) -> None:
    untracked._at_eval_forward(healthy())
    assert told == []
