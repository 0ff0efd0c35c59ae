"""Weights that a script puts into a wrapped model between two loops of one evaluation are weighed again, however it writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from harness.probe.sensors import evaluation
from harness.probe.state import S


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.nn.Module]:
    monkeypatch.setattr(evaluation, "_weighed", {})
    monkeypatch.setattr(S, "recorder", SimpleNamespace(syncs=0))
    monkeypatch.setattr(S.since, "num_backward", 0)
    wrapper = torch.nn.Module()
    wrapper.module = torch.nn.Linear(2, 2)
    S.ddps.append(SimpleNamespace(ref=lambda: wrapper, ignored=set()))
    yield wrapper
    S.ddps.pop()


def _copy(p: torch.Tensor) -> None:
    with torch.no_grad():
        p.copy_(torch.ones_like(p))


def _bind(p: torch.Tensor) -> None:
    p.data = torch.ones_like(p)


@pytest.mark.parametrize("write", [_copy, _bind, lambda p: p.data.copy_(torch.ones_like(p))])
def test_other_weights_in_one_evaluation(net: torch.nn.Module, write: Callable[[torch.Tensor], None]) -> None:
    one = evaluation.Evaluation(net, ("train.py", 3, "main"))
    for _ in range(3):
        one.weigh(net)
        one.weigh(net.module)  # a wrapper, and the model inside
    assert len(one.wrapped) == 2 and one.put_in == []
    for p in net.parameters():
        write(p)
    before = one.inputs
    for _ in range(3):
        one.weigh(net)
        one.weigh(net.module)
        one.note((torch.ones(4, 2),), {})
    assert one.inputs != before and one.put_in[0][1]
    assert len(one.put_in) == 1 and one.put_in[0][0] != one.wrapped[0]


def test_weights_that_a_backward_adapts_are_none(net: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    one = evaluation.Evaluation(net, ("train.py", 3, "main"))
    one.weigh(net)
    monkeypatch.setattr(S.since, "num_backward", 1)
    for p in net.parameters():
        _copy(p)
    one.weigh(net)
    assert one.put_in == []
