"""Averaged weights with blank statistics: told for the mistake, and for none of its healthy neighbours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe.sensors import layers, untracked

torch = pytest.importorskip("torch")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(untracked, "_calls", {})
    monkeypatch.setattr(untracked, "_told", set())
    monkeypatch.setattr(untracked, "S", SimpleNamespace(recorder=SimpleNamespace(event=lambda kind, site, **fields: found.append(fields))))
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
    average = averaged(trained(net()), buffers=False)
    for _ in range(4):
        untracked._at_eval_forward(average)
    assert told == [{"module": "Sequential", "num": 1}]


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
