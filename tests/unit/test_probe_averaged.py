"""An average that moves while the weights stand still: told for the mistake, and for none of its healthy neighbours."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe import lineage, names, sites
from harness.probe.sensors import averaged

torch = pytest.importorskip("torch")


def decay(average: Any, net: Any, factor: float = 0.9) -> None:
    with torch.no_grad():
        for a, p in zip(average.parameters(), net.parameters(), strict=True):
            a.lerp_(p, 1 - factor)


def noise(average: Any, net: Any) -> None:
    """Not an average: a copy that is perturbed anew."""
    with torch.no_grad():
        for a, p in zip(average.parameters(), net.parameters(), strict=True):
            a.copy_(p + torch.randn_like(p))


def copied(average: Any, net: Any) -> None:
    average.load_state_dict(net.state_dict())


def train(monkeypatch: pytest.MonkeyPatch, each: Callable[[Any, Any], None], stepped: Callable[[Any, Any], None], accumulate: int = 4) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Linear(6, 2))
    average = copy.deepcopy(net).requires_grad_(False)
    state = SimpleNamespace(steps=0, backwards=0, loss_site=None, recorder=SimpleNamespace(event=lambda kind, site, **fields: told.append(fields)))
    witness = SimpleNamespace(ids=[id(p) for p in net.parameters()], roots=[weakref.ref(net)])
    monkeypatch.setattr(averaged, "S", state)
    monkeypatch.setattr(averaged, "_averages", [])
    monkeypatch.setattr(averaged, "_known", [-1])
    monkeypatch.setattr(averaged, "_finds", [0])
    monkeypatch.setattr(averaged.steps, "_known", {1: witness})
    monkeypatch.setattr(names, "root_modules", lambda: [net, average])
    monkeypatch.setattr(lineage, "made_at", lambda module: None)
    monkeypatch.setattr(sites, "as_json", lambda site: None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(60):
        loss = net(torch.randn(8, 5)).square().mean()
        averaged._at_backward.__wrapped__(loss)
        loss.backward()
        state.backwards += 1
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            state.steps += 1
            stepped(average, net)
        each(average, net)
    return told


def once_between() -> Callable[[Any, Any], None]:
    """Behind the second of four micro-batches."""
    calls = [0]

    def move(average: Any, net: Any) -> None:
        calls[0] += 1
        if calls[0] % 4 == 2:
            decay(average, net)

    return move


def nothing(average: Any, net: Any) -> None:
    pass


def test_moved_at_every_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = train(monkeypatch, decay, nothing)
    assert (one["moves"], one["idle"], one["backwards"]) == (4, 3, 4)


@pytest.mark.parametrize(
    ("each", "stepped", "accumulate"),
    [(nothing, decay, 4), (decay, nothing, 1), (noise, nothing, 4), (nothing, copied, 4), (copied, nothing, 4), (nothing, nothing, 4), (once_between(), nothing, 4)],
)
def test_healthy_neighbours(monkeypatch: pytest.MonkeyPatch, each: Any, stepped: Any, accumulate: int) -> None:
    assert train(monkeypatch, each, stepped, accumulate) == []


def test_one_factor_for_all() -> None:
    assert averaged.approaches([1.0, 3.0], [0.9, 2.7], [0.0, 0.0])
    assert not averaged.approaches([1.0, 3.0], [0.9, 3.3], [0.0, 0.0])
    assert not averaged.approaches([1.0, 3.0], [1.1, 3.3], [0.0, 0.0])
    assert not averaged.approaches([0.0, 0.0], [1.0, 2.0], [0.0, 0.0])
