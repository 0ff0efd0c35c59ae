"""Parameters of a wrapped model that change inside of a hook on their own gradient: what the sensor finds in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.probe.sensors import hookupdates, leafhooks
from harness.probe.state import S

AT = ("train.py", 7, "main")


@pytest.fixture
def sensed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    recorder = SimpleNamespace(event=lambda kind, site=None, **fields: found.append({"kind": kind} | fields), disabled=False, errors=0)
    model = SimpleNamespace(require_backward_grad_sync=True)
    wrapped = SimpleNamespace(index=2, ref=lambda: model, names={}, refs={})
    for name, value in (("steps", 0), ("in_backward", 1), ("ddps", [wrapped]), ("recorder", recorder)):
        monkeypatch.setattr(S, name, value)
    monkeypatch.setattr(hookupdates, "_told", [0])
    monkeypatch.setattr(leafhooks, "_num", [0])
    monkeypatch.setattr(leafhooks, "_watched", lambda param: True)
    monkeypatch.setattr(hookupdates.ddp, "wrap_of", lambda param: 2)
    yield found


def backward(hook: Callable[[Any], Any]) -> Any:
    weight = torch.nn.Parameter(torch.ones(3))
    def called(p: Any) -> None:
        hook(p)

    leafhooks._register_accumulated(torch.Tensor.register_post_accumulate_grad_hook)(weight, called)
    hookupdates._at_backward(None)
    (weight * 2).sum().backward()
    return weight


def step(p: Any) -> None:
    optimizer = torch.optim.SGD([p], lr=0.5)
    hookupdates._at_any_step(optimizer)
    optimizer.step()


def test_a_step_inside_of_a_hook(sensed: list[dict[str, Any]]) -> None:
    weight = backward(step)
    (one,) = sensed
    assert (one["kind"], one["how"], one["index"], one["no_sync"], one["collectives"]) == ("hook_update", "step", 2, False, 0)
    assert weight.tolist() == [0.0, 0.0, 0.0]


def test_an_update_by_hand(sensed: list[dict[str, Any]]) -> None:
    backward(lambda p: p.data.add_(p.grad, alpha=-0.1))
    assert [e["how"] for e in sensed] == ["hand"]


def test_hooks_that_update_nothing(sensed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    backward(lambda p: p.grad.mul_(0.5))
    monkeypatch.setattr(hookupdates.ddp, "wrap_of", lambda param: -1)  # of no wrapped model
    backward(step)
    monkeypatch.setattr(hookupdates.ddp, "wrap_of", lambda param: 2)
    monkeypatch.setattr(S, "steps", hookupdates.NUM_STEPS)
    backward(step)
    assert sensed == []


def test_what_the_hook_averages_by_itself_is_told(sensed: list[dict[str, Any]]) -> None:
    def average(p: Any) -> None:
        S.since.num_coll += 1
        step(p)

    backward(average)
    assert [e["collectives"] for e in sensed] == [1]
