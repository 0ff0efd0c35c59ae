"""Which optimizer steps what a clip is given."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.probe import clipped
from harness.probe.sensors import steps


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Sequential:
    """The second layer belongs to optimizer 3, the third to two of them; the first is frozen."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[0].requires_grad_(False)
    ids = [[id(p) for p in layer.parameters()] for layer in net]
    monkeypatch.setattr(steps, "_known", {1: SimpleNamespace(opt=3, ids=ids[1] + ids[2]), 2: SimpleNamespace(opt=4, ids=ids[2])})
    return net


@pytest.mark.parametrize(("given", "opt"), [
    (lambda net: net.parameters(), 3),
    (lambda net: list(net.parameters()), 3),
    (lambda net: net[1].weight, 3),
    (lambda net: net[2].parameters(), -1),  # of two
    (lambda net: net[3].parameters(), -1),  # of none
    (lambda net: (p for p in net.parameters()), -1),  # nothing is drawn from it
    (lambda net: filter(None, net[1].parameters()), -1),
    (lambda net: None, -1),
    (lambda net: [], -1),
])  # fmt: skip
def test_owner(net: torch.nn.Sequential, given: Callable[[Any], Any], opt: int) -> None:
    assert clipped.owner(given(net)) == opt


def test_a_generator_is_as_full_as_before(net: torch.nn.Sequential) -> None:
    one = net.parameters()
    assert clipped.owner(one) == 3 and len(list(one)) == 8
    assert clipped.owner(one) == -1  # at its end
