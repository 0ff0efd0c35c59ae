"""A reference that shares its weights with the trained model: told for copy.copy, and for none of its healthy neighbours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe import sites
from harness.probe.sensors import shallowcopies, steps
from harness.probe.state import S, SinceStep

torch = pytest.importorskip("torch")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    recorder = SimpleNamespace(event=lambda kind, site, **fields: found.append(fields | {"func": site[2]}), disabled=False, errors=0)
    for name, value in (("recorder", recorder), ("compiling", False), ("steps", 0), ("since", SinceStep())):
        monkeypatch.setattr(S, name, value)
    for name, value in (("_open", []), ("_hooks", []), ("_num", [0])):
        monkeypatch.setattr(shallowcopies, name, value)
    monkeypatch.setattr(sites, "is_user_code", lambda code: code.co_filename == __file__)
    monkeypatch.setattr(sites, "as_json", lambda site: None)
    setstate = torch.nn.Module.__setstate__

    def noted(self: Any, state: Any) -> None:
        setstate(self, state)
        shallowcopies._note(None, self)

    monkeypatch.setattr(torch.nn.Module, "__setstate__", noted)
    return found


Loss = Callable[[Any, Any, Any, int], Any]


def train(monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Any], loss: Loss, num: int = 12) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    monkeypatch.setattr(steps, "_known", {0: SimpleNamespace(ids=[id(p) for p in net.parameters()])})
    other = make(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(num):
        monkeypatch.setattr(S, "steps", step)
        monkeypatch.setattr(S, "since", SinceStep())
        optimizer.zero_grad()
        loss(net, other, torch.randn(3, 4), step).backward()
        shallowcopies._at_step(optimizer)
        optimizer.step()


def pulled(net: Any, other: Any, x: Any, step: int) -> Any:
    with torch.no_grad():
        wanted = other(x)
    return (net(x) - wanted).square().mean() + net(x).mean()


def on_other_inputs(net: Any, other: Any, x: Any, step: int) -> Any:
    return pulled(net, lambda inputs: other(inputs + 1), x, step)


def once_for_three_updates(net: Any, other: Any, x: Any, step: int) -> Any:
    return pulled(net, other if step % 3 == 0 else lambda inputs: 0.0, x, step)


def behind_the_backward(net: Any, other: Any, x: Any, step: int) -> Any:
    made = net(x).mean()
    S.since.num_backward = 1
    with torch.no_grad():
        other(x)
    return made


def shallow(net: Any) -> Any:
    return copy.copy(net)


def test_a_shallow_copy(monkeypatch: pytest.MonkeyPatch, told: list[dict[str, Any]]) -> None:
    train(monkeypatch, shallow, pulled)
    assert [(e["num"], e["steps"], e["func"]) for e in told] == [(4, 4, "shallow")]
    assert not shallowcopies._hooks


def given_weights_of_its_own(net: Any) -> Any:
    made = copy.copy(net)
    made._modules = {name: copy.deepcopy(child) for name, child in net._modules.items()}
    return made


@pytest.mark.parametrize(
    ("make", "loss"),
    [(copy.deepcopy, pulled), (shallow, on_other_inputs), (shallow, once_for_three_updates), (shallow, behind_the_backward), (given_weights_of_its_own, pulled)],
)
def test_healthy(monkeypatch: pytest.MonkeyPatch, told: list[dict[str, Any]], make: Callable[[Any], Any], loss: Loss) -> None:
    train(monkeypatch, make, loss)
    assert told == []
    shallowcopies.modulehooks.remove(shallowcopies._hooks)
