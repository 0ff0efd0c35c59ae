"""What becomes of gradients between the backwards of one step, by their samples."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.probe import marks
from harness.probe.sensors import rescaled
from harness.probe.state import S


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(S, "recorder", SimpleNamespace(disabled=False, errors=0, event=lambda kind, site, **fields: events.append(fields)))
    monkeypatch.setattr(rescaled, "_open", {})
    monkeypatch.setattr(rescaled.cuts, "user_files", lambda: ())
    return events


def backward(net: torch.nn.Module) -> None:
    rescaled._enter(None)
    net(torch.randn(4, 3)).pow(2).sum().backward()
    rescaled._left(None)


@pytest.mark.parametrize(("between", "zeroed", "factors"), [
    (0.5, False, [0.5, 0.5]),
    (1.0, False, []),  # nothing is told
    (0.5, True, []),  # by sample: zero again before the next
])  # fmt: skip
def test_factors_that_gradients_are_multiplied_by(told: list[dict[str, Any]], between: float, zeroed: bool, factors: list[float]) -> None:
    torch.manual_seed(0)
    net, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters())
    marks.of(optimizer)
    for _ in range(3):
        backward(net)
        backward(other)  # of something else: no window ends with it
        for p in net.parameters():
            assert p.grad is not None
            p.grad.mul_(between)
        if zeroed:
            optimizer.zero_grad()
    rescaled._at_step(optimizer, SimpleNamespace(opt=0), None)
    assert [len(e["factors"]) for e in told] == ([2] if factors else [])
    assert all(math.isclose(a, b, rel_tol=1e-4) for e in told for a, b in zip(e["factors"], factors, strict=True))
    assert not told or math.isclose(told[0]["last"], between, rel_tol=1e-4)
